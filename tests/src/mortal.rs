//! Two connected RC QPs. The test kills the process of one of them during traffic.

use rnic_abi::types::QpId;
use rnic_client::{
    Access, Context, Gid, Qp, QpOptions, QpType, RecvRequest, RemoteMr, Sending, Wiring,
};

use crate::attached::Region;
use crate::traffic::Failure;
use crate::{DEADLINE, READ_WRITE};

/// Length of the lent region in bytes.
pub const LENT: usize = 256 * 1024;

/// Length in bytes of each receive of the process to be killed.
pub const RECEIVE: u32 = 4096;

/// Send attributes with the fewest retries.
pub const HASTY: Sending = Sending { sq_psn: 7, timeout: 10, retry_count: 1, rnr_retry: 7, ord: 4 };

/// Send attributes with the longest timeout.
const PATIENT: Sending = Sending { timeout: 31, retry_count: 7, ..HASTY };

/// Connects a QP to a QP of the same device, with the longest retry time.
///
/// # Errors
///
/// Errors of the library.
pub fn wire(qp: &Qp, gid: Gid, peer: QpId) -> Result<(), Failure> {
    let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let wiring = Wiring {
        local: gid,
        remote: gid,
        remote_qp: peer,
        rq_psn: 7,
        path_mtu: 1024,
        min_rnr_timer: 12,
        ird: 4,
        rights,
    };
    qp.to_rtr(&wiring)?;
    Ok(qp.to_rts(&PATIENT)?)
}

/// Prints a QP number and the lent region.
fn offer(qp: QpId, lent: &RemoteMr) {
    let bytes: String = lent.to_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    println!("answers as {qp} {bytes}");
}

/// Parses the line that the process to be killed has printed.
///
/// # Panics
///
/// If the line is malformed.
pub fn offered(line: &str) -> (QpId, RemoteMr) {
    let (qp, bytes) = line.split_once(' ').expect("a number and an address");
    let digits: Vec<char> = bytes.chars().collect();
    let byte = |two: &[char]| u8::from_str_radix(&two.iter().collect::<String>(), 16);
    let bytes: Result<Vec<u8>, _> = digits.chunks(2).map(byte).collect();
    let lent = RemoteMr::from_bytes(&bytes.expect("digits")).expect("an address");
    (QpId(qp.parse().expect("a number")), lent)
}

/// Runs the process to be killed: receives Sends from `peer` in an endless loop.
///
/// # Errors
///
/// Errors of the library, or if no message arrives before the deadline.
pub fn answer(context: &Context, peer: u32) -> Result<(), Failure> {
    let pd = context.open_pd(None)?;
    let lent = Region::new(&pd, vec![0; LENT], READ_WRITE)?;
    let inbox = Region::new(&pd, vec![0; RECEIVE as usize], READ_WRITE)?;
    let cq = context.create_cq(256, None)?;
    let options = QpOptions { kind: QpType::Rc, rq_depth: 64, ..QpOptions::new(&cq) };
    let qp = pd.create_qp(&options)?;
    let gid = context.gids()?[0].gid;
    let sges = [inbox.sge(RECEIVE)];
    qp.post_recv(&[RecvRequest::new(0, &sges); 64])?;
    wire(&qp, gid, QpId(peer))?;
    offer(qp.id(), &lent.remote());
    loop {
        let mut one = [Default::default()];
        if cq.wait(&mut one, Some(DEADLINE))? == 0 {
            return Err("no Send before the deadline".into());
        }
        one[0].ok()?;
        qp.post_recv(&[RecvRequest::new(0, &sges)])?;
    }
}
