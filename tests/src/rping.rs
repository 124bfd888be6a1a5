//! A client of rping's server (`rping -s -P`). First it requests an atomic operation, which the
//! server's device may not support, then it acts as rping's own client.

use std::net::SocketAddr;

use rnic_client::{
    Access, Completion, CompletionStatus, ConnectOptions, Context, Cq, Mr, Pd, Qp, QpOptions,
    RecvRequest, SendRequest,
};

use crate::DEADLINE;
use crate::traffic::Failure;

/// Requests an atomic operation. Returns the status of its completion and the reason for the
/// disconnect.
///
/// # Errors
///
/// If the connection fails, or the request does not complete.
pub fn request_atomic(
    context: &Context,
    server: SocketAddr,
) -> Result<(CompletionStatus, String), Failure> {
    let end = End::connect(context, server)?;
    let nowhere = end.region.remote().at(0);
    let request = SendRequest::fetch_add(1, end.region.sge(0, 8), nowhere, 1).signaled();
    end.qp.post_send(&[request])?;
    // The receive is flushed, too.
    let done = [end.completion()?, end.completion()?];
    let failed = done.iter().find(|one| one.wr_id == 1).ok_or("the request did not complete")?;
    let why = end.qp.wait_disconnected(Some(DEADLINE))?;
    Ok((failed.status, why.to_string()))
}

/// Offers bytes for a Read, as `rping -c` does first. Returns when the server has read them.
///
/// # Errors
///
/// If the connection or a request fails.
pub fn offer_bytes(context: &Context, server: SocketAddr) -> Result<(), Failure> {
    let end = End::connect(context, server)?;
    end.region.write_at(0, b"rdma-ping-0: from rnicd\0")?;
    // Address, rkey and length.
    let remote = end.region.remote().at(0);
    let mut offer = remote.addr.to_be_bytes().to_vec();
    offer.extend(remote.rkey.0.to_be_bytes());
    offer.extend((BYTES as u32).to_be_bytes());
    end.qp.post_send(&[SendRequest::send_inline(2, &offer).signaled()])?;
    for _ in 0..2 {
        end.completion()?.ok()?;
    }
    Ok(())
}

/// A connection with a receive for the server's message.
struct End {
    _pd: Pd,
    cq: Cq,
    region: Mr,
    qp: Qp,
}

impl End {
    fn connect(context: &Context, server: SocketAddr) -> Result<Self, Failure> {
        let pd = context.open_pd(None)?;
        let cq = context.create_cq(16, None)?;
        let buffer = context.create_shared_buffer(4096)?;
        let region = pd.reg_mr(&buffer, .., Access::LOCAL_WRITE | Access::REMOTE_READ)?;
        let qp = pd.create_qp(&QpOptions::new(&cq))?;
        qp.post_recv(&[RecvRequest::new(9, &[region.sge(BYTES, 64)])])?;
        qp.connect(server, &ConnectOptions::default())?;
        Ok(End { _pd: pd, cq, region, qp })
    }

    fn completion(&self) -> Result<Completion, Failure> {
        let mut one = [Completion::default()];
        match self.cq.wait(&mut one, Some(DEADLINE))? {
            0 => Err("no completion".into()),
            _ => Ok(one[0]),
        }
    }
}

/// rping's default size.
const BYTES: u64 = 64;
