//! Requests that cost the control thread more than they cost the client.

use std::convert::Infallible;
use std::path::Path;

use rnic_abi::abi::control::{ListKind, RequestBody};
use rnic_abi::types::QpId;
use rustix::event::{PollFd, PollFlags};

use super::progress::Progress;
use crate::raw::Raw;
use crate::traffic::Failure;

/// The request that is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Question {
    /// Lists of diagnoses, each with the maximum number of entries.
    Whys,
    /// Device attributes.
    Device,
}

/// Outstanding requests per session.
const DEPTH: usize = 32;

/// Sends requests from `sessions` sessions forever. Each session first causes `records` diagnoses.
pub fn run(
    socket: &Path,
    question: Question,
    sessions: usize,
    records: usize,
) -> Result<Infallible, Failure> {
    let mut raws = Vec::new();
    for _ in 0..sessions {
        let mut raw = Raw::try_open(socket).ok_or("no session")?;
        // Each refusal leaves a diagnosis.
        for _ in 0..records {
            let body = RequestBody::DestroyQp { qp: QpId(u32::MAX) };
            let _refused = raw.try_call(body, &[]).ok_or("no answer")?;
        }
        raws.push(raw);
    }
    let body = || match question {
        Question::Whys => RequestBody::List { what: ListKind::Diagnoses, from: 0 },
        Question::Device => RequestBody::QueryDevice,
    };
    let mut asked = vec![0; raws.len()];
    let progress = Progress::begin();
    loop {
        for (raw, asked) in raws.iter_mut().zip(&mut asked) {
            while *asked < DEPTH {
                raw.ask(body(), &[]);
                *asked += 1;
            }
        }
        let mut ready: Vec<_> =
            raws.iter().map(|raw| PollFd::new(&raw.socket, PollFlags::IN)).collect();
        rustix::event::poll(&mut ready, None)?;
        let ready: Vec<bool> = ready.iter().map(|r| !r.revents().is_empty()).collect();
        for ((raw, asked), ready) in raws.iter().zip(&mut asked).zip(ready) {
            if ready {
                raw.receive().ok_or("the session has ended")?;
                *asked -= 1;
                progress.add(1);
            }
        }
    }
}
