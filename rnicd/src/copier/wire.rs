//! What workers and copiers say to each other: one packet per job, one per answer, in order.
//!
//! A job is its number (8 bytes, little-endian as all numbers), the direction (1: 0 out, 1 in, 2 in
//! with the last bytes last), the number of pieces (1), per piece its address (8) and length (4),
//! then the bytes to be written. An answer is the number (8), the outcome (1: 0 done, 1 gone, 2 not
//! mapped), then the bytes that were read.

use rnic_core::device::copier::{CopyJob, CopyResult, Direction, MAX_COPY, Pieces};
use rnic_core::device::memory::Unreachable;
use rnic_core::shm::queue::MAX_SGE;

/// Bytes of the longest packet.
pub const MAX_PACKET: usize = 8 + 1 + 1 + 12 * MAX_SGE + MAX_COPY;

/// A job's packet.
pub fn emit_job(job: &CopyJob) -> Vec<u8> {
    let (direction, bytes): (u8, &[u8]) = match &job.direction {
        Direction::Out => (0, &[]),
        Direction::In { bytes, tail_last: false } => (1, bytes),
        Direction::In { bytes, tail_last: true } => (2, bytes),
    };
    let mut packet = Vec::with_capacity(10 + 12 * job.pieces.len() + bytes.len());
    packet.extend_from_slice(&job.id.to_le_bytes());
    // At most MAX_SGE pieces.
    packet.extend_from_slice(&[direction, job.pieces.len() as u8]);
    for (address, len) in &job.pieces {
        packet.extend_from_slice(&address.to_le_bytes());
        packet.extend_from_slice(&len.to_le_bytes());
    }
    packet.extend_from_slice(bytes);
    packet
}

/// A job as its copier sees it: number, pieces, and what is to be written, if anything, and how.
pub struct Job<'p> {
    /// Number of the job, which its answer repeats.
    pub id: u64,
    /// Ranges of the client's addresses, in order.
    pub pieces: Pieces,
    /// What is to be written, and whether the last bytes come last; nothing is to be read.
    pub write: Option<(&'p [u8], bool)>,
}

/// Reads a job's packet; `None` if it is none.
pub fn parse_job(packet: &[u8]) -> Option<Job<'_>> {
    let (id, rest) = packet.split_first_chunk()?;
    let ([direction, count], mut rest) = rest.split_first_chunk::<2>()?;
    let mut pieces = Pieces::new();
    let mut total = 0usize;
    for _ in 0..*count {
        let (address, after) = rest.split_first_chunk()?;
        let (len, after) = after.split_first_chunk()?;
        let len = u32::from_le_bytes(*len);
        pieces.try_push((u64::from_le_bytes(*address), len)).ok()?;
        total = total.checked_add(len as usize).filter(|n| *n <= MAX_COPY)?;
        rest = after;
    }
    let write = match (direction, rest.len()) {
        (0, 0) => None,
        (1 | 2, n) if n == total => Some((rest, *direction == 2)),
        _ => return None,
    };
    Some(Job { id: u64::from_le_bytes(*id), pieces, write })
}

/// Starts an answer's packet, to which the bytes that were read are added.
pub fn emit_answer(id: u64, outcome: Result<(), Unreachable>, packet: &mut Vec<u8>) {
    packet.clear();
    packet.extend_from_slice(&id.to_le_bytes());
    packet.push(match outcome {
        Ok(()) => 0,
        Err(Unreachable::Detached) => 1,
        Err(Unreachable::Unmapped | Unreachable::Truncated) => 2,
    });
}

/// Reads an answer's packet; `None` if it is none.
pub fn parse_answer(packet: &[u8]) -> Option<(u64, CopyResult)> {
    let (id, rest) = packet.split_first_chunk()?;
    let (outcome, bytes) = rest.split_first()?;
    let moved = match outcome {
        0 => Ok(bytes.to_vec()),
        1 => Err(Unreachable::Detached),
        2 => Err(Unreachable::Unmapped),
        _ => return None,
    };
    Some((u64::from_le_bytes(*id), moved))
}

#[cfg(test)]
mod tests {
    use rnic_core::device::Copier;
    use rnic_core::types::SessionId;

    use super::*;

    #[test]
    fn jobs_arrive_as_they_were_sent_and_not_cut_anywhere() {
        let copier = Copier::new(SessionId(1), 1);
        let pieces: Pieces = [(0x1122_3344_5566, 3), (7, 2)].into_iter().collect();
        for tail_last in [false, true] {
            let direction = Direction::In { bytes: b"12345".to_vec(), tail_last };
            let job = CopyJob { id: 9, copier: copier.clone(), pieces: pieces.clone(), direction };
            let packet = emit_job(&job);
            let seen = parse_job(&packet).expect("a job");
            assert_eq!((seen.id, &seen.pieces), (9, &pieces));
            assert_eq!(seen.write, Some((&b"12345"[..], tail_last)));
            for cut in 0..packet.len() {
                assert!(parse_job(&packet[..cut]).is_none(), "cut at {cut}");
            }
        }
        let job = CopyJob { id: 9, copier, pieces: pieces.clone(), direction: Direction::Out };
        let packet = emit_job(&job);
        assert!(parse_job(&packet).is_some_and(|j| j.write.is_none() && j.pieces == pieces));
        assert!(parse_job(&[packet, vec![0]].concat()).is_none());
    }

    #[test]
    fn answers_arrive_as_they_were_sent() {
        let mut packet = vec![1, 2, 3];
        for outcome in [Ok(()), Err(Unreachable::Detached), Err(Unreachable::Unmapped)] {
            emit_answer(77, outcome, &mut packet);
            packet.extend_from_slice(b"read");
            let expected = outcome.map(|()| b"read".to_vec());
            assert_eq!(parse_answer(&packet), Some((77, expected)));
        }
        assert_eq!(parse_answer(&[0; 8]), None);
        assert_eq!(parse_answer(&[9; 9]), None);
    }
}
