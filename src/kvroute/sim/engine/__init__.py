"""An engine that computes prompts and decodes in the same steps: KV blocks, scheduler, steps in time, clients."""
