//! A simple model of two connected QPs: the effect of each request on memory, its completion, and
//! the faults that end the stream.

use std::collections::VecDeque;

use proptest::prelude::*;

use rnic_abi::types::{Access, AtomicOperation};

/// Number of regions per end. By index: all rights, remotely readable, limited to one QP, no remote
/// rights, revoked from the start.
pub(super) const REGIONS: usize = 5;
pub(super) const REGION_LEN: usize = 200;
/// The region that is limited to its end's QP.
pub(super) const OWN: usize = 2;
pub(super) const REVOKED: usize = 4;
/// Index after the regions: a window of type 2 on a part of region 0, if it is bound.
pub(super) const WINDOW: usize = REGIONS;

pub(super) fn rights(region: usize) -> Access {
    match region {
        0 => Access::LOCAL_WRITE | WINDOW_RIGHTS | Access::MW_BIND,
        WINDOW => WINDOW_RIGHTS,
        1 => Access::REMOTE_READ,
        3 => Access::LOCAL_WRITE,
        _ => Access::LOCAL_WRITE | WINDOW_RIGHTS,
    }
}

const WINDOW_RIGHTS: Access =
    Access::REMOTE_WRITE.union(Access::REMOTE_READ).union(Access::REMOTE_ATOMIC);

/// Start of a range in a region. The range may exceed the region.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub region: usize,
    pub at: usize,
}

impl Place {
    fn range(self, len: usize) -> std::ops::Range<usize> {
        self.at..self.at + len
    }
}

/// An operation of one end.
#[derive(Clone, Debug)]
pub(super) enum Op {
    Receive { at: usize, len: usize },
    Write { from: Place, to: Place, len: usize, inline: bool, immediate: Option<u64> },
    Send { from: Place, len: usize, inline: bool, solicited: bool, invalidate: Option<usize> },
    Read { sink: Place, from: Place, len: usize, invalidate: bool },
    Atomic { operation: AtomicOperation, sink: Place, to: Place },
    LocalInvalidate { region: usize },
    Bind { at: usize, len: usize },
}

/// Returns operations that may fail in every way.
pub(super) fn any_op() -> impl Strategy<Value = (usize, Op)> {
    let region = prop_oneof![6 => Just(0usize), 1 => Just(1), 3 => Just(OWN), 1 => Just(3),
        1 => Just(REVOKED), 4 => Just(WINDOW)];
    let place = (region.clone(), prop_oneof![12 => 0usize..100, 1 => 100usize..REGION_LEN + 2])
        .prop_map(|(region, at)| Place { region, at });
    let len = prop_oneof![1 => Just(0usize), 8 => 1usize..60, 1 => 60usize..100];
    let op = prop_oneof![
        6 => (0usize..100, 0usize..100).prop_map(|(at, len)| Op::Receive { at, len }),
        4 => (place.clone(), place.clone(), len.clone(), any::<bool>(),
              prop_oneof![3 => Just(None), 1 => any::<u64>().prop_map(Some)])
            .prop_map(|(from, to, len, inline, immediate)| {
                Op::Write { from, to, len, inline, immediate }
            }),
        4 => (operation(), place.clone(), place.clone(), prop_oneof![6 => Just(!7), 1 => Just(!0)])
            .prop_map(|(operation, sink, to, aligned)| {
                Op::Atomic { operation, sink, to: Place { at: to.at & aligned, ..to } }
            }),
        4 => (place.clone(), len.clone(), any::<bool>(), any::<bool>(),
              prop_oneof![8 => Just(None), 1 => region.clone().prop_map(Some)])
            .prop_map(|(from, len, inline, solicited, invalidate)| {
                Op::Send { from, len, inline, solicited, invalidate }
            }),
        4 => (place.clone(), place, len, prop_oneof![9 => Just(false), 1 => Just(true)])
            .prop_map(|(sink, from, len, invalidate)| Op::Read { sink, from, len, invalidate }),
        1 => region.prop_map(|region| Op::LocalInvalidate { region }),
        3 => (0usize..100, prop_oneof![20 => 60usize..101, 1 => 0usize..REGION_LEN])
            .prop_map(|(at, len)| Op::Bind { at, len }),
    ];
    (0usize..2, op)
}

/// Returns atomic operations. Some compare with a value that the word probably has.
fn operation() -> impl Strategy<Value = AtomicOperation> {
    let mask = || prop_oneof![3 => Just(u64::MAX), 1 => any::<u64>(), 1 => Just(0)];
    prop_oneof![
        (any::<u64>(), prop_oneof![2 => Just(0), 1 => any::<u64>()])
            .prop_map(|(add, boundaries)| AtomicOperation::FetchAdd { add, boundaries }),
        (any::<u64>(), mask(), prop_oneof![Just(0), any::<u64>()], mask()).prop_map(
            |(swap, swap_mask, compare, compare_mask)| {
                AtomicOperation::CompareSwap { swap, swap_mask, compare, compare_mask }
            }
        ),
    ]
}

/// Returns operations whose result does not depend on concurrent ones: sources are regions that are
/// never written, and no operation fails.
pub(super) fn safe_op() -> impl Strategy<Value = (usize, Op)> {
    let source = (0usize..100).prop_map(|at| Place { region: 1, at });
    let len = prop_oneof![1 => Just(0usize), 8 => 1usize..100];
    let op = prop_oneof![
        3 => (source.clone(), 0usize..90, len.clone(), any::<bool>()).prop_map(
            |(from, at, len, inline)| Op::Write {
                from, to: Place { region: OWN, at }, len, inline: inline && len <= 60,
                immediate: None }),
        // Beyond the range of the Writes.
        2 => (operation(), 0usize..100).prop_map(|(operation, at)| Op::Atomic {
                operation, sink: Place { region: 3, at }, to: Place { region: OWN, at: 192 } }),
        3 => (source.clone(), len.clone(), any::<bool>(), any::<bool>()).prop_map(
            |(from, len, inline, solicited)| Op::Send {
                from, len, inline: inline && len <= 60, solicited, invalidate: None }),
        3 => (source, 0usize..100, len).prop_map(|(from, at, len)| Op::Read {
                sink: Place { region: 3, at }, from, len, invalidate: false }),
    ];
    (0usize..2, op)
}

/// State of both ends.
pub(super) struct Model {
    pub memory: [[Vec<u8>; REGIONS]; 2],
    enabled: [[bool; REGIONS]; 2],
    /// The part of region 0 that the window of an end is bound to: start and length.
    windows: [Option<(usize, usize)>; 2],
    receives: [VecDeque<(u64, usize, usize)>; 2],
    /// New completions.
    pub completions: [Vec<String>; 2],
    /// The end that terminated the stream, and the code.
    pub ended: Option<(usize, &'static str)>,
}

impl Model {
    pub fn new(memory: [[Vec<u8>; REGIONS]; 2]) -> Self {
        let mut enabled = [[true; REGIONS]; 2];
        enabled[0][REVOKED] = false;
        enabled[1][REVOKED] = false;
        Model {
            memory,
            enabled,
            windows: [None; 2],
            receives: Default::default(),
            completions: Default::default(),
            ended: None,
        }
    }

    pub fn apply(&mut self, me: usize, id: u64, op: &Op) {
        let peer = 1 - me;
        let name = match op {
            Op::Receive { at, len } => {
                self.receives[me].push_back((id, *at, *len));
                return;
            }
            Op::Write { .. } => "RdmaWrite",
            Op::Send { .. } => "Send",
            Op::Read { .. } => "RdmaRead",
            Op::Atomic { operation: AtomicOperation::FetchAdd { .. }, .. } => "FetchAdd",
            Op::Atomic { operation: AtomicOperation::CompareSwap { .. }, .. } => "CompareSwap",
            Op::LocalInvalidate { .. } => "LocalInvalidate",
            Op::Bind { .. } => "BindMw",
        };
        if self.ended.is_some() {
            self.completions[me].push(format!("{id} {name} WrFlush"));
            return;
        }
        if !self.is_local_valid(me, op) {
            self.completions[me].push(format!("{id} {name} LocalProtection"));
            return self.end(me, "0/0/00");
        }
        match op {
            Op::Receive { .. } => {}
            Op::Write { from, to, len, immediate, .. } => {
                self.completions[me].push(format!("{id} RdmaWrite"));
                match self.remote(peer, *to, *len, Access::REMOTE_WRITE) {
                    Ok(()) => {
                        let bytes = self.bytes(me, *from, *len);
                        self.put(peer, *to, &bytes);
                        if let Some(data) = immediate {
                            self.deliver_immediate(peer, *data, *len);
                        }
                    }
                    Err(Refused::Bounds) => self.end(peer, "1/1/01"),
                    Err(Refused::Gone | Refused::Right) => self.end(peer, "1/1/00"),
                }
            }
            Op::Send { from, len, solicited, invalidate, .. } => {
                self.completions[me].push(format!("{id} Send"));
                let bytes = self.bytes(me, *from, *len);
                self.deliver(peer, &bytes, *solicited, *invalidate);
            }
            Op::Read { sink, from, len, invalidate } => {
                let code = match self.remote(peer, *from, *len, Access::REMOTE_READ) {
                    Ok(()) => {
                        let bytes = self.bytes(peer, *from, *len);
                        self.put(me, *sink, &bytes);
                        if *invalidate {
                            if !self.may_invalidate(me, sink.region) {
                                let len = spaced(*len);
                                let failed = format!("{id} RdmaRead LocalProtection{len}");
                                self.completions[me].push(failed);
                                return self.end(me, "0/0/00");
                            }
                            self.disable(me, sink.region);
                        }
                        self.completions[me].push(format!("{id} RdmaRead{}", spaced(*len)));
                        return;
                    }
                    Err(Refused::Gone) => "0/1/00",
                    Err(Refused::Right) => "0/1/02",
                    Err(Refused::Bounds) => "0/1/01",
                };
                self.completions[me].push(format!("{id} RdmaRead RemoteAccess {code}"));
                self.end(peer, code);
            }
            Op::Atomic { operation, sink, to } => {
                let at = self.resolve(peer, *to).at;
                let failed = match self.remote(peer, *to, 8, Access::REMOTE_ATOMIC) {
                    Ok(()) if at.is_multiple_of(8) => {
                        let old = self.bytes(peer, *to, 8);
                        self.put(me, *sink, &old);
                        let old = old.try_into().map_or(0, u64::from_ne_bytes);
                        self.put(peer, *to, &operation.applied_to(old).to_ne_bytes());
                        self.completions[me].push(format!("{id} {name} 8"));
                        return;
                    }
                    Ok(()) => "RemoteOperation 0/2/07",
                    Err(Refused::Gone) => "RemoteAccess 0/1/00",
                    Err(Refused::Right) => "RemoteAccess 0/1/02",
                    Err(Refused::Bounds) => "RemoteAccess 0/1/01",
                };
                self.completions[me].push(format!("{id} {name} {failed}"));
                self.end(peer, failed.split_once(' ').map_or(failed, |(_, code)| code));
            }
            Op::LocalInvalidate { region } => {
                self.disable(me, *region);
                self.completions[me].push(format!("{id} LocalInvalidate"));
            }
            Op::Bind { at, len } => {
                let inside = *len > 0 && at + len <= REGION_LEN;
                if self.windows[me].is_some() || !self.enabled[me][0] || !inside {
                    self.completions[me].push(format!("{id} BindMw MwBind"));
                    return self.end(me, "0/0/00");
                }
                self.windows[me] = Some((*at, *len));
                self.completions[me].push(format!("{id} BindMw"));
            }
        }
    }

    fn deliver(&mut self, to: usize, bytes: &[u8], solicited: bool, invalidate: Option<usize>) {
        let Some((id, at, room)) = self.receives[to].pop_front() else {
            return self.end(to, "1/2/02");
        };
        if bytes.len() > room {
            self.completions[to].push(format!("{id} Receive LocalLength 1/2/05"));
            return self.end(to, "1/2/05");
        }
        if !bytes.is_empty() && !self.enabled[to][0] {
            self.completions[to].push(format!("{id} Receive LocalProtection"));
            return self.end(to, "0/0/00");
        }
        self.put(to, Place { region: 0, at }, bytes);
        let len = spaced(bytes.len());
        let solicited = if solicited { " solicited" } else { "" };
        match invalidate {
            None => self.completions[to].push(format!("{id} Receive{len}{solicited}")),
            Some(region @ (OWN | WINDOW)) if self.is_enabled(to, region) => {
                self.disable(to, region);
                let name = if region == OWN { "OWN" } else { "WINDOW" };
                let done = format!("{id} Receive{len}{solicited} invalidated {name}");
                self.completions[to].push(done);
            }
            Some(region) => {
                let code = if self.is_enabled(to, region) { "0/2/09" } else { "0/1/09" };
                let refused = format!("{id} Receive RemoteInvalidRequest{len}{solicited}");
                self.completions[to].push(refused);
                self.end(to, code);
            }
        }
    }

    /// Delivers Immediate Data after a Write of `len` bytes.
    fn deliver_immediate(&mut self, to: usize, data: u64, len: usize) {
        let Some((id, ..)) = self.receives[to].pop_front() else {
            return self.end(to, "1/2/02");
        };
        let len = spaced(len);
        self.completions[to].push(format!("{id} Receive{len} immediate {data:#x}"));
    }

    fn is_enabled(&self, end: usize, region: usize) -> bool {
        match region {
            WINDOW => self.windows[end].is_some(),
            _ => self.enabled[end][region],
        }
    }

    /// Returns true if the owner may invalidate the region, which must not have a window.
    fn may_invalidate(&self, end: usize, region: usize) -> bool {
        self.is_enabled(end, region) && !(region == 0 && self.windows[end].is_some())
    }

    fn disable(&mut self, end: usize, region: usize) {
        match region {
            WINDOW => self.windows[end] = None,
            _ => self.enabled[end][region] = false,
        }
    }

    /// Returns the place in a region for a place in a window.
    fn resolve(&self, end: usize, place: Place) -> Place {
        match (place.region, self.windows[end]) {
            (WINDOW, Some((at, _))) => Place { region: 0, at: at + place.at },
            (WINDOW, None) => Place { region: 0, at: REGION_LEN },
            _ => place,
        }
    }

    fn is_local_valid(&self, me: usize, op: &Op) -> bool {
        let inside = |p: &Place, len: usize| {
            let key = p.region != WINDOW && self.enabled[me][p.region];
            len == 0 || key && p.at + len <= REGION_LEN
        };
        match op {
            Op::Write { inline: true, .. } | Op::Send { inline: true, .. } => true,
            Op::Write { from, len, .. } | Op::Send { from, len, .. } => inside(from, *len),
            Op::Read { sink, invalidate: true, .. }
                if sink.region == WINDOW && self.windows[me].is_some() =>
            {
                false
            }
            Op::Read { sink, len, .. } => {
                *len == 0 || inside(sink, *len) && rights(sink.region).contains(Access::LOCAL_WRITE)
            }
            Op::Atomic { sink, .. } => {
                inside(sink, 8) && rights(sink.region).contains(Access::LOCAL_WRITE)
            }
            Op::LocalInvalidate { region } => self.may_invalidate(me, *region),
            // A failed bind has its own status.
            Op::Receive { .. } | Op::Bind { .. } => true,
        }
    }

    fn remote(&self, owner: usize, place: Place, len: usize, right: Access) -> Result<(), Refused> {
        if len == 0 {
            Ok(())
        } else if !self.is_enabled(owner, place.region) {
            Err(Refused::Gone)
        } else if !rights(place.region).contains(right) {
            Err(Refused::Right)
        } else if place.at + len > self.length(owner, place.region) {
            Err(Refused::Bounds)
        } else {
            Ok(())
        }
    }

    fn length(&self, owner: usize, region: usize) -> usize {
        match (region, self.windows[owner]) {
            (WINDOW, Some((_, len))) => len,
            _ => REGION_LEN,
        }
    }

    /// Returns the bytes of a place. The source of inline data may exceed its region.
    pub fn bytes(&self, of: usize, place: Place, len: usize) -> Vec<u8> {
        let place = self.resolve(of, place);
        let region = &self.memory[of][place.region];
        place.range(len).map(|at| region.get(at).copied().unwrap_or(0xEE)).collect()
    }

    fn put(&mut self, of: usize, place: Place, bytes: &[u8]) {
        let place = self.resolve(of, place);
        if !bytes.is_empty() {
            self.memory[of][place.region][place.range(bytes.len())].copy_from_slice(bytes);
        }
    }

    fn end(&mut self, by: usize, code: &'static str) {
        self.ended = Some((by, code));
        for (receives, completions) in self.receives.iter_mut().zip(&mut self.completions) {
            let flushed = receives.drain(..).map(|(id, ..)| format!("{id} Receive WrFlush"));
            completions.extend(flushed);
        }
    }
}

enum Refused {
    Gone,
    Right,
    Bounds,
}

fn spaced(len: usize) -> String {
    if len == 0 { String::new() } else { format!(" {len}") }
}
