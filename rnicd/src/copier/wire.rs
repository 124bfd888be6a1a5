//! What workers and copiers say to each other: one packet per job, one per answer, in order.
//!
//! A job is its number (8 bytes, little-endian as all numbers), the direction (1: 0 out, 1 in, 2 in
//! with the last bytes last, 3 a change of a word), the number of pieces (1), per piece its address
//! (8) and length (4), then the bytes to be written, or of a change its opcode (1) and parameters
//! (4 x 8), as a send queue has them. An answer is the number (8), the outcome (1: 0 done, 1 gone,
//! 2 not mapped), then the bytes that were read.

use rnic_core::abi::queue::SendOpcode;
use rnic_core::device::copier::{CopyJob, CopyResult, Direction, MAX_COPY, Pieces};
use rnic_core::device::memory::Unreachable;
use rnic_core::shm::queue::MAX_SGE;
use rnic_core::types::{ATOMIC_LEN, AtomicOperation};

/// Bytes of the longest packet.
pub const MAX_PACKET: usize = 8 + 1 + 1 + 12 * MAX_SGE + MAX_COPY;

/// A job's packet.
pub fn emit_job(job: &CopyJob) -> Vec<u8> {
    let change;
    let (direction, bytes): (u8, &[u8]) = match &job.direction {
        Direction::Out => (0, &[]),
        Direction::In { bytes, tail_last: false } => (1, bytes),
        Direction::In { bytes, tail_last: true } => (2, bytes),
        Direction::Update(operation) => {
            change = emit_change(*operation);
            (3, &change)
        }
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

/// Bytes of a change of a word: opcode and parameters.
const CHANGE_LEN: usize = 1 + 4 * 8;

fn emit_change(operation: AtomicOperation) -> [u8; CHANGE_LEN] {
    let (opcode, params) = SendOpcode::of_operation(operation);
    let mut bytes = [0; CHANGE_LEN];
    bytes[0] = opcode as u8;
    for (at, param) in bytes[1..].chunks_exact_mut(8).zip(params) {
        at.copy_from_slice(&param.to_le_bytes());
    }
    bytes
}

fn parse_change(bytes: &[u8; CHANGE_LEN]) -> Option<AtomicOperation> {
    let mut params = [0; 4];
    for (param, at) in params.iter_mut().zip(bytes[1..].as_chunks().0) {
        *param = u64::from_le_bytes(*at);
    }
    SendOpcode::from_u8(bytes[0])?.operation(params)
}

/// A job as its copier sees it.
pub struct Job<'p> {
    /// Number of the job, which its answer repeats.
    pub id: u64,
    /// Ranges of the client's addresses, in order.
    pub pieces: Pieces,
    /// What is to be done there.
    pub task: Task<'p>,
}

/// What a copier is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task<'p> {
    /// Read all pieces.
    Read,
    /// Write these bytes; whether the last ones come last.
    Write(&'p [u8], bool),
    /// Change the word that is the only piece.
    Update(AtomicOperation),
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
    let task = match (direction, rest.len()) {
        (0, 0) => Task::Read,
        (1 | 2, n) if n == total => Task::Write(rest, *direction == 2),
        (3, CHANGE_LEN) if matches!(pieces[..], [(_, ATOMIC_LEN)]) => {
            Task::Update(parse_change(rest.try_into().ok()?)?)
        }
        _ => return None,
    };
    Some(Job { id: u64::from_le_bytes(*id), pieces, task })
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
            assert_eq!(seen.task, Task::Write(b"12345", tail_last));
            for cut in 0..packet.len() {
                assert!(parse_job(&packet[..cut]).is_none(), "cut at {cut}");
            }
        }
        let direction = Direction::Out;
        let job = CopyJob { id: 9, copier: copier.clone(), pieces: pieces.clone(), direction };
        let packet = emit_job(&job);
        assert!(parse_job(&packet).is_some_and(|j| j.task == Task::Read && j.pieces == pieces));
        assert!(parse_job(&[packet, vec![0]].concat()).is_none());
        let word: Pieces = [(0x1122_3344_5566, 8)].into_iter().collect();
        for operation in [
            AtomicOperation::FetchAdd { add: 1, boundaries: 2 },
            AtomicOperation::CompareSwap { swap: 3, swap_mask: 4, compare: 5, compare_mask: 6 },
        ] {
            let direction = Direction::Update(operation);
            let job = CopyJob { id: 9, copier: copier.clone(), pieces: word.clone(), direction };
            let packet = emit_job(&job);
            let seen = parse_job(&packet).expect("a job");
            assert_eq!((seen.pieces, seen.task), (word.clone(), Task::Update(operation)));
            assert!(parse_job(&packet[..packet.len() - 1]).is_none());
            // A word is one piece of eight bytes.
            let job = CopyJob { pieces: pieces.clone(), ..job };
            assert!(parse_job(&emit_job(&job)).is_none());
        }
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
