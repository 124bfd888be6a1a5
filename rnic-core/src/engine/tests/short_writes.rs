//! RDMA Writes that the direct path executes straight from the send queue. Their results must equal
//! those of Writes that become messages.

use proptest::prelude::*;

use super::rc;
use super::requests::{Mr, Wr, pattern};
use super::world::{A, B, MemoryKind, QpShape, Wiring, World};
use rnic_abi::abi::queue::SendFlags;
use rnic_abi::types::Access;

/// Length of the regions in bytes.
const LEN: usize = 70_000;
/// Maximum length of a Write in one segment.
const SEGMENT: usize = 15 * 4096;

#[derive(Clone, Debug)]
enum Op {
    Inline {
        len: usize,
        at: usize,
    },
    Element {
        len: usize,
        at: usize,
    },
    Two {
        len: usize,
        at: usize,
    },
    /// Writes into memory of the peer that only a copier can access.
    Aside {
        len: usize,
    },
    Read {
        len: usize,
    },
    Send {
        len: usize,
    },
    Faulty(Fault),
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    NoSuchKey,
    OutsideOfSource,
    NoSuchStag,
    NoRight,
    OutsideOfSink,
    Opcode,
    SpareParameter,
}

fn op() -> impl Strategy<Value = Op> {
    let len = || prop_oneof![5 => 0..60usize, 2 => 0..5000usize, 1 => SEGMENT - 1..SEGMENT + 2];
    let at = || 0..5000usize;
    let fault = prop_oneof![
        Just(Fault::NoSuchKey),
        Just(Fault::OutsideOfSource),
        Just(Fault::NoSuchStag),
        Just(Fault::NoRight),
        Just(Fault::OutsideOfSink),
        Just(Fault::Opcode),
        Just(Fault::SpareParameter),
    ];
    prop_oneof![
        30 => (0..64usize, at()).prop_map(|(len, at)| Op::Inline { len, at }),
        30 => (len(), at()).prop_map(|(len, at)| Op::Element { len, at }),
        3 => (0..60usize, at()).prop_map(|(len, at)| Op::Two { len, at }),
        3 => len().prop_map(|len| Op::Aside { len }),
        3 => len().prop_map(|len| Op::Read { len }),
        3 => (0..60usize).prop_map(|len| Op::Send { len }),
        1 => fault.prop_map(Op::Faulty),
    ]
}

/// Regions of one world.
struct Regions {
    source: Mr,
    sink: Mr,
    aside: Mr,
    /// Source of Reads. Never written, because Reads may complete at any time.
    only_read: Mr,
    back: Mr,
    received: Mr,
}

impl Regions {
    fn request(&self, n: usize, op: &Op) -> Wr {
        let Regions { source, sink, aside, only_read, back, .. } = self;
        let wr_id = n as u64;
        match *op {
            Op::Inline { len, at } => {
                Wr::write(wr_id, &[], sink, at as u64).inline(&pattern(len, n as u8))
            }
            Op::Element { len, at } => Wr::write(wr_id, &[source.sge(n..n + len)], sink, at as u64),
            Op::Two { len, at } => {
                let two = [source.sge(n..n + len), source.sge(9..10)];
                Wr::write(wr_id, &two, sink, at as u64)
            }
            Op::Aside { len } => Wr::write(wr_id, &[source.sge(n..n + len)], aside, n as u64),
            Op::Read { len } => Wr::read(wr_id, back.sge(n..n + len), only_read, 0),
            Op::Send { len } => Wr::send(wr_id, &[source.sge(n..n + len)]),
            Op::Faulty(fault) => {
                let mut write = Wr::write(wr_id, &[source.sge(0..8)], sink, 0);
                match fault {
                    Fault::NoSuchKey => write.sges[0].lkey ^= 1 << 20,
                    Fault::OutsideOfSource => write.sges[0].addr += LEN as u64 - 7,
                    Fault::NoSuchStag => write.header.rkey ^= 1 << 20,
                    Fault::NoRight => write = write.remote(only_read.stag, only_read.iova),
                    Fault::OutsideOfSink => write.header.remote_addr += LEN as u64 - 7,
                    Fault::Opcode => write.header.opcode = 0xEE,
                    Fault::SpareParameter => write.header.params[3] = 1,
                }
                write
            }
        }
    }
}

/// All visible results of some requests.
#[derive(Debug, PartialEq)]
struct Outcome {
    of_sender: Vec<String>,
    of_receiver: Vec<String>,
    events: [Vec<String>; 2],
    diagnoses: Vec<String>,
    counters: [String; 2],
    memory: [Vec<u8>; 4],
}

/// Users and type of a pair of QPs.
#[derive(Clone, Copy, Debug)]
enum Pair {
    /// iWARP QPs of two users, or of the only user.
    Connected { alone: bool },
    /// RC QPs.
    Reliable,
    /// UC QPs.
    Unreliable,
}

fn pair() -> impl Strategy<Value = Pair> {
    prop_oneof![
        any::<bool>().prop_map(|alone| Pair::Connected { alone }),
        Just(Pair::Reliable),
        Just(Pair::Unreliable),
    ]
}

fn world(pair: Pair, cq_entries: u32) -> World {
    let shape = QpShape { sq: 64, rq: 64, ..QpShape::default() };
    let shape = match pair {
        Pair::Connected { alone: true } => return World::pair_alone(shape, cq_entries),
        Pair::Connected { .. } => return World::pair_with(Wiring::direct(), shape, cq_entries),
        Pair::Reliable => rc::kept(shape),
        Pair::Unreliable => QpShape { unreliable: true, ..shape },
    };
    let mut w = rc::unlinked_of(Wiring::direct(), shape, cq_entries);
    w.link([A, B], Wiring::direct(), rc::LIMITS);
    w
}

/// Carries out requests, posted `step` at a time, with these flags on every Write.
fn carry_out(
    ops: &[(Op, bool)],
    step: usize,
    cq_entries: u32,
    pair: Pair,
    flags: SendFlags,
) -> Outcome {
    let mut w = world(pair, cq_entries);
    w.kind = MemoryKind::ThroughCopier;
    let aside = w.any_mr(B, LEN);
    w.kind = MemoryKind::Shared;
    let regions = Regions {
        aside,
        source: w.any_mr(A, LEN),
        sink: w.any_mr(B, LEN),
        only_read: w.mr(B, LEN, Access::REMOTE_READ),
        back: w.any_mr(A, LEN),
        received: w.any_mr(B, 64),
    };
    regions.source.pattern(1);
    regions.only_read.pattern(2);
    for n in 0..64 {
        w.recv(B, n, &[regions.received.all()]);
    }
    let mut of_sender = Vec::new();
    let mut of_receiver = Vec::new();
    let requests: Vec<Wr> = ops
        .iter()
        .enumerate()
        .map(|(n, (op, signaled))| {
            let request = regions.request(n, op);
            let request = if *signaled { request } else { request.unsignaled() };
            let reads = ops[..n].iter().any(|(op, _)| matches!(op, Op::Read { .. }));
            match op {
                Op::Read { .. } | Op::Send { .. } => request,
                // The flags are part of its diagnosis.
                Op::Faulty(Fault::SpareParameter) if !reads => request,
                Op::Faulty(Fault::SpareParameter) => request.with(SendFlags::FENCE),
                // Without a fence, earlier Reads could complete or be flushed.
                Op::Faulty(_) if reads => request.with(flags | SendFlags::FENCE),
                _ => request.with(flags),
            }
        })
        .collect();
    for some in requests.chunks(step) {
        w.post(A, some);
        loop {
            let sent = w.completions(A);
            let received = w.completions(B);
            if sent.is_empty() && received.is_empty() {
                break;
            }
            of_sender.extend(sent);
            of_receiver.extend(received);
            w.settle();
        }
    }
    Outcome {
        of_sender,
        of_receiver,
        events: [w.events(A), w.events(B)],
        diagnoses: [A, B].iter().flat_map(|qp| w.diagnoses(*qp)).map(|d| d.text).collect(),
        counters: [A, B].map(|qp| format!("{:?}", w.qps[qp].shared.counters())),
        memory: [&regions.back, &regions.sink, &regions.aside, &regions.received].map(Mr::bytes),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A Write with the solicited flag, which has no meaning for a Write, is not handled directly.
    #[test]
    fn direct_writes_end_like_messages(
        ops in prop::collection::vec((op(), any::<bool>()), 1..60),
        step in 1..60usize,
        cq_entries in prop_oneof![Just(4u32), Just(256)],
        pair in pair(),
    ) {
        let at_once = carry_out(&ops, step, cq_entries, pair, SendFlags::empty());
        let as_messages = carry_out(&ops, step, cq_entries, pair, SendFlags::SOLICITED);
        prop_assert_eq!(at_once, as_messages);
    }
}
