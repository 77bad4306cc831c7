"""Commands that try kvroute on one machine: `demo`, `emulate`, `testbed`."""
