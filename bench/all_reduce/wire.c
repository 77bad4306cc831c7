// Drops IPv4 UDP packets of more than 60 bytes at random, or none: the loss of a wire. Everything else passes.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 2);  // 0: loss in packets per million; 1: packets dropped
  __type(key, __u32);
  __type(value, __u64);
} settings SEC(".maps");

SEC("xdp")
int wire(struct xdp_md *context) {
  __u32 loss_key = 0, dropped_key = 1;
  __u64 *loss = bpf_map_lookup_elem(&settings, &loss_key), *dropped = bpf_map_lookup_elem(&settings, &dropped_key);
  struct ethhdr *ethernet = (void *)(long)context->data;
  struct iphdr *ip = (void *)(ethernet + 1);
  if (!loss || !dropped || (void *)(ip + 1) > (void *)(long)context->data_end) return XDP_PASS;
  if (ethernet->h_proto != bpf_htons(ETH_P_IP) || ip->protocol != IPPROTO_UDP) return XDP_PASS;
  if (bpf_get_prandom_u32() % 1000000 >= *loss) return XDP_PASS;
  __sync_fetch_and_add(dropped, 1);
  return XDP_DROP;
}

char _license[] SEC("license") = "GPL";
