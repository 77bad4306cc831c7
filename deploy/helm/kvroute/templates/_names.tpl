{{/* Labels of all objects of the chart. */}}
{{- define "kvroute.labels" -}}
app.kubernetes.io/name: kvroute-operator
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvroute
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels that select the operator's pods. */}}
{{- define "kvroute.selector" -}}
app.kubernetes.io/name: kvroute-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* The image, by digest if there is one. */}}
{{- define "kvroute.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end }}

{{/* Where the API server finds a webhook: its path is the argument `path`. */}}
{{- define "kvroute.webhookClient" -}}
clientConfig:
  service: {name: kvroute-webhook, namespace: {{ .root.Release.Namespace }}, path: {{ .path }}, port: 443}
admissionReviewVersions: [v1]
sideEffects: None
timeoutSeconds: {{ .root.Values.webhook.timeoutSeconds }}
{{- end }}

{{/* Annotations of the webhook configurations. */}}
{{- define "kvroute.webhookAnnotations" -}}
{{- if eq .Values.webhook.certificates.source "cert-manager" }}
annotations:
  cert-manager.io/inject-ca-from: {{ .Release.Namespace }}/kvroute-webhook
{{- end }}
{{- end }}
