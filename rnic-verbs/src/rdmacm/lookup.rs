//! QPs for the lookups of `RDMA_PS_UDP` (`rdma_connect(3)`).
//!
//! In the daemon a lookup belongs to a QP. In librdmacm an id can look up a peer without a QP:
//! programs create their QP later, destroy it before the reply, or use one QP for several ids. So
//! each lookup has a hidden QP, which carries no datagrams.

use parking_lot::Mutex;
use rnic_client::{Context, Cq, CqOptions, Error, Pd, Qp, QpOptions, QpType};

/// The PD and the CQ of these QPs, created by the first lookup.
#[derive(Default)]
pub(super) struct Lookups(Mutex<Option<(Pd, Cq)>>);

impl Lookups {
    /// Creates a QP for a lookup.
    pub(super) fn create_qp(&self, context: &Context) -> Result<Qp, Error> {
        let mut kept = self.0.lock();
        let (pd, cq) = match kept.take() {
            Some(made) => kept.insert(made),
            None => {
                let pd = context.open_pd(None)?;
                let cq = context.create_cq_with(&CqOptions { entries: 1, ..Default::default() })?;
                kept.insert((pd, cq))
            }
        };
        pd.create_qp(&QpOptions {
            sq_depth: 1,
            rq_depth: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline: 0,
            kind: QpType::Ud,
            ..QpOptions::new(cq)
        })
    }
}
