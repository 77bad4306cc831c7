// The ai-sdk: objects of a schema, whole and streamed, choices, tools and embeddings; and the openai SDK's embeddings.
import assert from 'node:assert/strict';
import { createRequire } from 'node:module';
import { join } from 'node:path';

const [url, model, packages] = process.argv.slice(2);
const require = createRequire(join(packages, 'package.json'));
const { embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } = require('ai');
const { createOpenAI } = require('@ai-sdk/openai');
const { createOpenAICompatible } = require('@ai-sdk/openai-compatible');
const { z } = require('zod');
const OpenAI = require('openai').default;

const options = { baseURL: `${url}/v1`, apiKey: 'none' };
const compatible = createOpenAICompatible({ name: 'kvroute', ...options, supportsStructuredOutputs: true });
const openai = createOpenAI(options);
const schema = z.object({ city: z.string().min(2), degrees: z.number().int().min(-40).max(50), sky: z.enum(['clear', 'rain']) });
const prompt = 'What is the weather?';

for (const chosen of [compatible(model), openai.chat(model), openai.responses(model)]) {
  const { object, finishReason } = await generateObject({ model: chosen, schema, prompt, maxRetries: 0 });
  schema.parse(object);
  assert.equal(finishReason, 'stop');
  const streamed = streamObject({ model: chosen, schema, prompt, maxRetries: 0 });
  for await (const part of streamed.partialObjectStream) assert.equal(typeof part, 'object');
  assert.deepEqual(await streamed.object, object);
  const calls = [];
  const weather = tool({
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { calls.push(city); return 'rain'; },
  });
  const said = await generateText({ model: chosen, tools: { weather }, stopWhen: stepCountIs(3), prompt, maxRetries: 0 });
  assert.equal(calls.length, 1);
  assert.notEqual(said.text, '');
  assert.equal(said.finishReason, 'stop');
  let text = '';
  for await (const part of streamText({ model: chosen, prompt, maxRetries: 0 }).textStream) text += part;
  assert.notEqual(text, '');
}

const { embeddings } = await embedMany({ model: openai.embedding(model), values: ['a', 'b'], maxRetries: 0 });
assert.equal(embeddings.length, 2);
const client = new OpenAI(options);
const packed = (await client.embeddings.create({ model, input: 'hi' })).data[0].embedding;
const listed = (await client.embeddings.create({ model, input: 'hi', encoding_format: 'float' })).data[0].embedding;
assert.equal(packed.length, listed.length);
packed.forEach((value, index) => assert.ok(Math.abs(value - listed[index]) < 1e-6));
