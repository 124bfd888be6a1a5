//! Resolves an STag in a peer's request to its memory, with all checks.

use std::hint::black_box;

use rnic_abi::shm::Mapping;
use rnic_abi::types::{Access, MrId, PdId, QpId, Scope, SessionId, Stag};
use rnic_core::device::stag::Principal;
use rnic_core::device::{Memory, StagAllocator, StagEntry, StagKind, StagTable};

use crate::{Run, Subject};

/// Number of lookups per run.
const LOOK_UPS: usize = 1000;
/// Size of a region in bytes.
const REGION: usize = 64;
const PRINCIPAL: Principal = Principal { session: SessionId(1), pd: PdId(2), qp: QpId(3) };

pub(crate) fn subjects() -> Vec<Subject> {
    let mut all = Vec::new();
    for regions in [10, 100_000] {
        for (what, among) in [("others", regions), ("same", 1)] {
            let what = format!("{what}/{regions}");
            let prepare = move || look_up(regions, among);
            all.push(Subject::counted("stags", what, LOOK_UPS as u64, prepare));
        }
    }
    all
}

/// Looks up the first `among` of the regions in turn, in an order unrelated to their addresses.
fn look_up(regions: usize, among: usize) -> Run {
    let (mapping, _fd) =
        Mapping::create_arena("bench", regions * REGION).expect("memory for the arena");
    let mut allocator = StagAllocator::new([7; 32]);
    let mut table = StagTable::default();
    let mut known: Vec<(Stag, usize)> = Vec::new();
    for offset in (0..).step_by(REGION).take(regions) {
        let stag = allocator.allocate().expect("there are many more");
        table.install(StagEntry {
            stag,
            kind: StagKind::region(),
            mr: MrId(stag.0),
            session: PRINCIPAL.session,
            pd: PRINCIPAL.pd,
            scope: Scope::Pd,
            access: Access::LOCAL_WRITE | Access::REMOTE_WRITE,
            iova: 0x1000,
            length: REGION as u64,
            memory: Memory::Shared { mapping: mapping.clone(), offset },
        });
        known.push((stag, offset));
    }
    assert_eq!(table.len(), regions);
    assert!(table.remote(PRINCIPAL, Stag(0), 0x1000, 8, Access::REMOTE_WRITE).is_err());
    // Multiplication by a prime visits each region once per round.
    let order: Vec<(Stag, usize)> = (0..among).map(|n| known[n * 99_991 % among]).collect();
    let mut next = 0;
    Box::new(move || {
        for _ in 0..LOOK_UPS {
            let (stag, offset) = order[next];
            next = if next + 1 == order.len() { 0 } else { next + 1 };
            let found = table.remote(PRINCIPAL, black_box(stag), 0x1008, 8, Access::REMOTE_WRITE);
            let place = found.ok().and_then(|target| target.shared());
            assert_eq!(place.map(|(_, at, len)| (at, len)), Some((offset + 8, 8)));
        }
    })
}
