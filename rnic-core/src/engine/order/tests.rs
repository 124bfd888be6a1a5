//! Pending pieces alone: random programs against the promises of each model.

use std::time::Duration;

use super::chooser::{PieceId, Position, hold_time};
use super::pending::{Arrival, Kind, MAX_BYTES, Pending, Piece};
use crate::device::memory::Payload;
use rnic_abi::faults::FaultName;
use rnic_abi::faults::order::{Order, OrderModel, OrderRule};
use rnic_abi::types::{Stag, Time};

const HOLD: Duration = Duration::from_micros(800);

fn rule(order: Order, model: OrderModel) -> OrderRule {
    OrderRule { fault: FaultName::parse("test").unwrap(), order, model, inversions: None }
}

/// A xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

/// For each word of memory: the word of the stream that writes it, and the time of its arrival.
struct Oracle {
    /// Arrival time of each word of the stream.
    arrived: Vec<Time>,
    visible: Vec<bool>,
}

impl Oracle {
    fn place(&mut self, piece: &Piece) {
        for n in 0..piece.bytes.len() / 8 {
            let word = usize::try_from(piece.part.to / 8).unwrap() + n;
            let value = u64::from_ne_bytes(piece.bytes[8 * n..8 * n + 8].try_into().unwrap());
            assert_eq!(value, word as u64, "the bytes of another word");
            assert!(!std::mem::replace(&mut self.visible[word], true), "placed twice");
        }
    }
}

/// Runs a random program of this many steps.
fn run(seed: u64, model: OrderModel, steps: u64) {
    let mut random = Random(seed | 1);
    let order = match seed % 4 {
        0 => Order::Worst { hold: HOLD },
        _ => Order::Random { seed, hold: HOLD },
    };
    let mut pending = Pending::new(rule(order, model), 7);
    let mut oracle = Oracle { arrived: Vec::new(), visible: Vec::new() };
    let mut now = Time(0);
    for _ in 0..steps {
        match random.below(8) {
            0 => pending.release_all(|piece| oracle.place(piece)),
            1 | 2 => {
                now = now.after(HOLD / 4 * u32::try_from(random.below(6)).unwrap());
                pending.release_due(now, |piece| oracle.place(piece));
            }
            _ => {
                let from = oracle.arrived.len();
                let most = if random.below(50) == 0 { 7000 } else { 20 };
                let words = 1 + random.below(most);
                let bytes: Vec<u8> =
                    (from as u64..from as u64 + words).flat_map(u64::to_ne_bytes).collect();
                oracle.arrived.resize(from + bytes.len() / 8, now);
                oracle.visible.resize(from + bytes.len() / 8, false);
                let arrival = Arrival {
                    kind: Kind::Write,
                    stag: Stag(1),
                    to: 8 * from as u64,
                    last: random.below(3) > 0,
                };
                let payload = Payload::Bytes(&bytes);
                pending.arrive(arrival, &payload, now, |piece| oracle.place(piece)).unwrap();
            }
        }
        let hidden = oracle.visible.iter().position(|visible| !visible);
        assert_eq!(pending.bytes() == 0, hidden.is_none());
        assert!(pending.bytes() <= MAX_BYTES);
        if let Some(hidden) = hidden {
            assert!(pending.due().is_some_and(|due| due > now));
            assert!(now.since(oracle.arrived[hidden]) < HOLD, "held for too long");
            if model == OrderModel::Rc {
                let later = oracle.visible[hidden..].iter().any(|visible| *visible);
                assert!(!later, "a word has passed an earlier one");
            }
        } else {
            assert_eq!(pending.due(), None);
            oracle.arrived.clear();
            oracle.visible.clear();
        }
    }
    pending.release_all(|piece| oracle.place(piece));
    assert!(oracle.visible.iter().all(|visible| *visible), "lost");
}

#[test]
fn models_hold_in_random_programs() {
    // More than a million steps.
    for model in OrderModel::ALL {
        for seed in 0..12_000 {
            run(seed * 0x9E37_79B9 + 1, model, 30);
        }
    }
}

#[test]
fn choices_depend_on_the_seed_and_position() {
    let choices = |seed: u64, stream: u64| -> Vec<bool> {
        let order = Order::Random { seed, hold: HOLD };
        let of = |message| {
            let id = PieceId { stream, message, offset: 0 };
            hold_time(&order, id, Position::Only, message % 2 == 0).is_some()
        };
        (0..1000).map(of).collect()
    };
    let one = choices(1, 1);
    assert_eq!(one, choices(1, 1));
    for other in [choices(2, 1), choices(1, 2)] {
        let different = one.iter().zip(&other).filter(|(a, b)| a != b).count();
        assert!((400..600).contains(&different), "{different} of 1000");
    }
    let held = one.iter().filter(|held| **held).count();
    assert!((400..600).contains(&held), "{held} of 1000");
}

#[test]
fn pieces_never_tear_a_word() {
    for len in 1..200 {
        for to in 0..16 {
            let mut pending = Pending::new(rule(Order::Worst { hold: HOLD }, OrderModel::Iwarp), 1);
            let arrival = Arrival { kind: Kind::Write, stag: Stag(1), to, last: true };
            let bytes: Vec<u8> = (0..len).collect();
            let mut found = vec![0xFF; usize::from(len)];
            let mut place = |piece: &Piece| {
                let from = (piece.part.to - to) as usize;
                assert!(from == 0 || piece.part.to.is_multiple_of(8), "{len} bytes at {to}");
                found[from..from + piece.bytes.len()].copy_from_slice(&piece.bytes);
            };
            pending.arrive(arrival, &Payload::Bytes(&bytes), Time(0), &mut place).unwrap();
            pending.release_all(&mut place);
            assert_eq!(found, bytes, "{len} bytes at {to}");
        }
    }
}
