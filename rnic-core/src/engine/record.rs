//! Records of what befell a queue pair, in the device's log.
//!
//! The first fault of a stream is also the reason of every flush that follows, so a QP remembers its
//! number. What this side brings about itself is put aside, where it displaces no fault.

use super::diagnosis::{FLUSHED, LOST, Words, about, rule_of};
use super::qp::{Phase, Qp};
use super::reason::Reason;
use super::{Output, Shard};
use crate::abi::control::{DisconnectReason, WhyKind};
use crate::device::why::Why;
use crate::rdmap::{Layout, Terminate, codes};
use crate::types::{CompletionStatus, TerminateCode, TerminateOrigin};

impl Qp {
    /// Keeps a record and returns its number. The first of a QP is the reason of its end.
    fn put_on_record(&mut self, shard: &Shard, what: WhyKind, words: Words) -> u64 {
        let Words { rule, text, stag, offset, length } = words;
        let id = shard.options.why.record(
            shard.now,
            Why {
                qp: Some(self.id),
                pd: Some(self.pd),
                stag,
                offset,
                length,
                addresses: self.addresses,
                ..Why::new(self.session, what, rule, text)
            },
        );
        if self.why == 0 {
            self.why = id;
        }
        id
    }

    /// A request or receive fails, and with it the stream: the number for its completion.
    pub(super) fn failed(&mut self, shard: &Shard, wr_id: u64, reason: Reason) -> u64 {
        let what = WhyKind::Completion { wr_id, status: reason.status() };
        let words = reason.words(&self.principal(), &shard.stags);
        self.put_on_record(shard, what, words)
    }

    /// As [`failed`](Self::failed), but the stream goes on.
    pub(super) fn failed_alone(&mut self, shard: &Shard, wr_id: u64, reason: Reason) -> u64 {
        let before = self.why;
        let id = self.failed(shard, wr_id, reason);
        self.why = before;
        id
    }

    /// The stream ends by a Terminate of this side with this header.
    pub(super) fn terminated_by_us(
        &mut self,
        shard: &mut Shard,
        code: TerminateCode,
        payload: &[u8],
        reason: Reason,
    ) {
        if self.why == 0 {
            let what = WhyKind::Terminate { origin: TerminateOrigin::Local, code };
            let mut words = reason.words(&self.principal(), &shard.stags);
            if matches!(reason, Reason::Segment) {
                words.rule = rule_of(code);
            }
            if words.stag.is_none()
                && words.length.is_none()
                && let Ok(t) = Terminate::parse(payload)
            {
                words = about(&t, words);
            }
            self.put_on_record(shard, what, words);
        }
        self.note(shard, "qp_terminated", &format!("sent Terminate {code}"));
    }

    /// The stream ends by a Terminate of the peer's, which may blame a request of this side.
    pub(super) fn terminated_by_peer(
        &mut self,
        shard: &mut Shard,
        t: &Terminate<'_>,
        request: Option<u64>,
    ) {
        let code = t.code;
        let mut text = format!("the peer ended the stream with Terminate {code}");
        if let Some(wr_id) = request {
            text += &format!(", for this side's request {wr_id}");
        }
        if t.layout == Layout::Siw {
            text += ", written as Linux siw does";
        }
        let what = WhyKind::Terminate { origin: TerminateOrigin::Peer, code };
        let words = about(t, Words::new(rule_of(code), text));
        self.put_on_record(shard, what, words);
        self.note(shard, "qp_terminated", &format!("received Terminate {code}"));
    }

    /// The connection is lost.
    pub(super) fn connection_lost(&mut self, shard: &mut Shard, why: &str) {
        if self.why == 0 {
            self.put_on_record(shard, WhyKind::Lost, Words::new(LOST, why));
            self.note(shard, "connection_lost", why);
        }
    }

    /// The number for a flushed request: the reason of the end, or a record of how else the stream
    /// came to it.
    pub(super) fn flushed(&mut self, shard: &Shard, wr_id: u64) -> u64 {
        if self.why != 0 {
            return self.why;
        }
        if self.flush_why == 0 {
            let text = match (&self.end, self.phase) {
                _ if self.send_cq.is_dead() || self.recv_cq.is_dead() => {
                    "a completion queue of the queue pair is dead"
                }
                (Some(DisconnectReason::Aborted), _) => {
                    "this side ended the connection at once, or moved the queue pair to Error"
                }
                (Some(_), Phase::Dead) => "the connection was closed in order",
                (None, Phase::Dead) => "the queue pair is in Error and not connected",
                _ if self.peer_fin => "the peer has finished sending (FIN): no more Sends come",
                _ => "the connection is being closed",
            };
            let status = CompletionStatus::WrFlush;
            let what = WhyKind::Completion { wr_id, status };
            self.flush_why = self.put_aside(shard, what, FLUSHED, text);
        }
        self.flush_why
    }

    /// The QP is destroyed while connected; its peer is told by a Terminate.
    pub(super) fn destroyed(&self, shard: &Shard) {
        let code = codes::RDMA_LOCAL_CATASTROPHIC;
        let what = WhyKind::Terminate { origin: TerminateOrigin::Local, code };
        let text = "the queue pair was destroyed, or its session ended, while it was connected";
        self.put_aside(shard, what, &rule_of(code), text);
    }

    /// Keeps a record of what this side brought about itself, where it displaces no fault.
    fn put_aside(&self, shard: &Shard, what: WhyKind, rule: &str, text: &str) -> u64 {
        let why = Why {
            routine: true,
            qp: Some(self.id),
            pd: Some(self.pd),
            addresses: self.addresses,
            ..Why::new(self.session, what, rule, text)
        };
        shard.options.why.record(shard.now, why)
    }

    /// Tells whoever watches the daemon.
    fn note(&self, shard: &mut Shard, kind: &'static str, text: &str) {
        let text = format!("QP {}: {text} (why {})", self.id, self.why);
        shard.outputs.push_back(Output::Note { session: self.session, kind, text });
    }
}
