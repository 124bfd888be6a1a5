//! The limits of outstanding Reads, IRD and ORD.

use super::raw::ulpdu;
use super::requests::Wr;
use super::world::{QpShape, Wiring, World};
use crate::ddp::qn;
use crate::rdmap::{Opcode, ReadRequest};
use rnic_abi::types::{QpState, Stag, TaggedOffset};

//= RDMAP-5.2.2-2
//= RDMAP-6.1-3
//= RDMAP-6.1-4
//= RDMAP-6.1-6
//= RDMAP-6.1-7
/// With small and large values of IRD and ORD, exactly the negotiated number of Reads are
/// outstanding in each direction.
#[test]
fn outstanding_reads_obey_ird_and_ord() {
    for agreed in [1, 2, 3, 16, 200] {
        // The peer accepts fewer Reads than this side requests.
        let options = |ird, ord| {
            let wiring = Wiring::tcp().with(|o| {
                o.peer_to_peer = false;
                o.ird = ird;
                o.ord = ord;
            });
            wiring.a
        };
        let ours = options(agreed + 2, agreed + 5);
        let theirs = options(agreed, agreed + 2);
        let mut w = World::new(&[1]);
        let app = w.app(0);
        let cq = w.cq(app, 512);
        let qp = w.qp(app, cq, cq, QpShape { sq: 256, ..QpShape::default() });
        let mut raw = w.connect_raw(qp, true, ours, theirs);
        assert_eq!(w.events(qp), [format!("established {}/{agreed}", agreed + 2)]);
        let region = w.any_mr(qp, 4);
        let reads: Vec<Wr> =
            (0..u64::from(agreed) + 3).map(|n| Wr::read(n, region.all(), &region, 0)).collect();
        w.post(qp, &reads);
        assert_eq!(raw.segments(&mut w).len(), usize::from(agreed));
        // A message blocks the stream, so waiting requests use all slots.
        w.links[0].pipes[0].window = 0;
        w.post(qp, &[Wr::send(900, &[])]);
        let request = ReadRequest {
            sink_stag: Stag(1),
            sink_to: TaggedOffset(0),
            size: 4,
            src_stag: region.stag,
            src_to: TaggedOffset(region.iova),
        };
        let mut taken = 0;
        while w.state(qp) == QpState::Rts {
            assert!(taken < 2 * u32::from(agreed) + 10, "all are taken");
            taken += 1;
            raw.read(&mut w, taken, &request);
        }
        let header = raw.untagged(Opcode::ReadRequest, qn::READ_REQUEST, taken, 0, true);
        w.links[0].pipes[0].window = 1 << 30;
        w.settle();
        let sent = raw.segments(&mut w);
        let answered = sent.iter().filter(|s| s.opcode() == Opcode::ReadResponse).count();
        let told = &sent.last().unwrap().payload;
        assert_eq!(told[..4], [0x12, 0x02, 0xC0, 0]);
        assert_eq!(told[6..], ulpdu(&header, &[]));
        // A response that was passed to TCP frees its slot, even if TCP has not sent it.
        let waiting = taken - 1 - answered as u32;
        assert_eq!(waiting, u32::from(agreed) + 2, "of {taken}");
    }
}
