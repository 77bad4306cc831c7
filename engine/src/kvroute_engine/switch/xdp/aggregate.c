// The switch's data plane in the kernel (XDP): sums the DATA packets of jobs that user space has handed over.
//
// The protocol is that of wire.py and aggregator.py; every other packet goes on to the socket of `kvroute switch`.
// `aggregate` runs on every port where workers are. It sends a result to all ports; `address` then runs once per port
// and writes the address of the job's worker there, or drops the copy.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define MAGIC 0x4B52
#define PROTOCOL 1
#define KIND_DATA 1
#define KIND_RESULT 2
#define REDUCTION_SUM 0
#define REDUCTION_MAX 1
#define CHUNK_VALUES 256
#define NOT_FRAGMENTED 0x4000
#define TIME_TO_LIVE 64

// Numbers are little-endian, as on every machine that can load this program.
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "packets are little-endian");

struct data {
  __u16 magic;
  __u8 protocol;
  __u8 kind;
  __u32 job;
  __u32 epoch;
  __u8 worker;
  __u8 workers;
  __u16 slot;
  __u8 version;
  __u8 reduction;
  __u64 chunk;
  __s32 values[CHUNK_VALUES];
} __attribute__((packed));

struct frame {
  struct ethhdr ethernet;
  struct iphdr ip;
  struct udphdr udp;
  struct data data;
} __attribute__((packed));

struct job {
  __u32 epoch;
  __u32 first_slot;
  __u16 slots;
  __u8 workers;
  __u8 padding;
};

struct port_of_job {
  __u32 job;
  __u32 interface;
};

// A worker, by job and port. User space writes it; the kernel adds MAC addresses and what it has received.
struct worker {
  __u32 address;         // network byte order
  __u32 switch_address;  // network byte order
  __u16 udp;             // network byte order
  __u16 switch_udp;      // network byte order
  __u8 number;
  __u8 heard;            // 1: it has sent data in this epoch
  __u8 mac[ETH_ALEN];
  __u8 switch_mac[ETH_ALEN];
  __u16 padding;
  __u64 packets;
};

struct slot {
  struct bpf_spin_lock lock;
  __u32 epoch;
  __u64 next[2];  // chunk + 1 of each version; 0: none in this epoch
  __u64 seen[2];  // bitmap of the workers whose values are in it
  __s32 values[2][CHUNK_VALUES];
};

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(max_entries, 4096);
  __type(key, __u32);
  __type(value, struct job);
} jobs SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(max_entries, 65536);
  __type(key, struct port_of_job);
  __type(value, struct worker);
} workers SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, 1);  // user space sets the number of slots
  __type(key, __u32);
  __type(value, struct slot);
} slots SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_DEVMAP_HASH);
  __uint(max_entries, 256);
  __type(key, __u32);
  __type(value, struct bpf_devmap_val);
} ports SEC(".maps");

enum counter { PACKETS, RESULTS, COUNTERS };

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, COUNTERS);
  __type(key, __u32);
  __type(value, __u64);
} counters SEC(".maps");

static __always_inline void count(__u32 which) {
  __u64 *counter = bpf_map_lookup_elem(&counters, &which);
  if (counter) *counter += 1;
}

static __always_inline struct frame *frame_of(struct xdp_md *context) {
  struct frame *frame = (void *)(long)context->data;
  if ((void *)(frame + 1) > (void *)(long)context->data_end) return NULL;
  if (frame->ethernet.h_proto != bpf_htons(ETH_P_IP)) return NULL;
  if (frame->ip.version != 4 || frame->ip.ihl != 5 || frame->ip.protocol != IPPROTO_UDP) return NULL;
  if (frame->ip.frag_off & bpf_htons((__u16)~NOT_FRAGMENTED)) return NULL;
  if (frame->udp.len != bpf_htons(sizeof(struct udphdr) + sizeof(struct data))) return NULL;
  if (frame->data.magic != MAGIC || frame->data.protocol != PROTOCOL) return NULL;
  return frame;
}

enum outcome { NOTHING, ANSWER, RESULT };

// Adds a packet's values to a slot. If the result is complete, it replaces the packet's values.
static __always_inline enum outcome add(struct slot *slot, struct data *data) {
  __u32 version = data->version & 1;
  __s32 *values = version ? slot->values[1] : slot->values[0];
  __s32 *given = data->values;
  __u64 bit = 1ULL << (data->worker & 63), next = data->chunk + 1;
  __u64 all = data->workers == 64 ? ~0ULL : (1ULL << (data->workers & 63)) - 1;
  enum outcome outcome = NOTHING;
  bpf_spin_lock(&slot->lock);
  if (data->epoch > slot->epoch) {
    slot->epoch = data->epoch;
    slot->next[0] = slot->next[1] = 0;
    slot->seen[0] = slot->seen[1] = 0;
  }
  __u64 known = version ? slot->next[1] : slot->next[0];
  __u64 seen = version ? slot->seen[1] : slot->seen[0];
  if (data->epoch < slot->epoch || next < known) {
    bpf_spin_unlock(&slot->lock);
    return NOTHING;  // late: this worker has the result
  }
  if (next > known) {
    for (int i = 0; i < CHUNK_VALUES; i++) values[i] = given[i];
    seen = bit;
    if (seen == all) outcome = RESULT;
  } else if (seen & bit) {
    if (seen == all) outcome = ANSWER;
  } else {
    seen |= bit;
    if (data->reduction == REDUCTION_SUM) {
      for (int i = 0; i < CHUNK_VALUES; i++) values[i] += given[i];
    } else {
      for (int i = 0; i < CHUNK_VALUES; i++) values[i] = values[i] > given[i] ? values[i] : given[i];
    }
    if (seen == all) outcome = RESULT;
  }
  if (version) {
    slot->next[1] = next;
    slot->seen[1] = seen;
  } else {
    slot->next[0] = next;
    slot->seen[0] = seen;
  }
  if (outcome != NOTHING) {
    for (int i = 0; i < CHUNK_VALUES; i++) given[i] = values[i];
  }
  bpf_spin_unlock(&slot->lock);
  return outcome;
}

SEC("xdp")
int aggregate(struct xdp_md *context) {
  struct frame *frame = frame_of(context);
  if (!frame || frame->data.kind != KIND_DATA) return XDP_PASS;
  struct data *data = &frame->data;
  __u32 number = data->job;
  struct job *job = bpf_map_lookup_elem(&jobs, &number);
  if (!job || data->epoch != job->epoch || data->workers != job->workers) return XDP_PASS;
  if (data->worker >= data->workers || data->slot >= job->slots) return XDP_PASS;
  if (data->version > 1 || data->reduction > REDUCTION_MAX) return XDP_PASS;
  struct port_of_job key = {.job = number, .interface = context->ingress_ifindex};
  struct worker *worker = bpf_map_lookup_elem(&workers, &key);
  if (!worker || worker->number != data->worker || worker->address != frame->ip.saddr) return XDP_PASS;
  if (worker->switch_address != frame->ip.daddr) return XDP_PASS;
  if (worker->udp != frame->udp.source || worker->switch_udp != frame->udp.dest) return XDP_PASS;
  __u32 at = job->first_slot + data->slot;
  struct slot *slot = bpf_map_lookup_elem(&slots, &at);
  if (!slot) return XDP_PASS;
  __builtin_memcpy(worker->mac, frame->ethernet.h_source, ETH_ALEN);
  __builtin_memcpy(worker->switch_mac, frame->ethernet.h_dest, ETH_ALEN);
  worker->heard = 1;
  __sync_fetch_and_add(&worker->packets, 1);
  count(PACKETS);

  enum outcome outcome = add(slot, data);
  if (outcome == NOTHING) return XDP_DROP;
  data->kind = KIND_RESULT;
  frame->udp.check = 0;  // IPv4 allows UDP without one
  if (outcome == RESULT) {
    count(RESULTS);
    return bpf_redirect_map(&ports, 0, BPF_F_BROADCAST);
  }
  __builtin_memcpy(frame->ethernet.h_source, worker->switch_mac, ETH_ALEN);
  __builtin_memcpy(frame->ethernet.h_dest, worker->mac, ETH_ALEN);
  frame->ip.saddr = worker->switch_address;  // both addresses change places, so the checksum stays
  frame->ip.daddr = worker->address;
  frame->udp.source = worker->switch_udp;
  frame->udp.dest = worker->udp;
  return XDP_TX;
}

static __always_inline __u16 checksum(struct frame *frame) {
  __u16 *words = (void *)frame + sizeof(struct ethhdr);
  __u32 sum = 0;
  frame->ip.check = 0;
  for (int i = 0; i < 10; i++) sum += words[i];
  sum = (sum & 0xFFFF) + (sum >> 16);
  return ~(sum + (sum >> 16));
}

SEC("xdp/devmap")
int address(struct xdp_md *context) {
  struct frame *frame = frame_of(context);
  if (!frame) return XDP_DROP;
  struct port_of_job key = {.job = frame->data.job, .interface = context->egress_ifindex};
  struct worker *worker = bpf_map_lookup_elem(&workers, &key);
  if (!worker) return XDP_DROP;
  __builtin_memcpy(frame->ethernet.h_source, worker->switch_mac, ETH_ALEN);
  __builtin_memcpy(frame->ethernet.h_dest, worker->mac, ETH_ALEN);
  frame->ip.saddr = worker->switch_address;
  frame->ip.daddr = worker->address;
  frame->ip.ttl = TIME_TO_LIVE;
  frame->ip.check = checksum(frame);
  frame->udp.source = worker->switch_udp;
  frame->udp.dest = worker->udp;
  return XDP_PASS;
}

char _license[] SEC("license") = "GPL";
