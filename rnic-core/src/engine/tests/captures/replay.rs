//! Plays one side of a recorded connection with our engine, and the other side from the recording.
//!
//! The engine gets the recorded peer's bytes packet by packet, in the recorded order. Where its
//! side posted a request (a Send, a Write, a Read), the test posts the same request. The engine
//! itself must create the messages that RNICs send without a request (Read Responses, Terminates,
//! the first message of the peer-to-peer model). Regions have the recorded STags and addresses.

use std::collections::{BTreeMap, HashMap, VecDeque};

use super::conversation::{Act, Conversation, Message, MessageReader};
use super::recording::Side;
use crate::engine::tests::link::Cuts;
use crate::engine::tests::raw::Raw;
use crate::engine::tests::requests::{Mr, Wr};
use crate::engine::tests::world::{A, QpShape, World};
use crate::mpa::startup::{Frame, FrameKind, Progress, Repr};
use crate::rdmap::{Layout, Opcode, Terminate};
use crate::stream::startup::{
    ConnectRequest, Initiator, InitiatorStep, Negotiated, Options, Responder, ResponderStep,
    RtrKinds,
};
use rnic_abi::abi::control::DiagnosisKind;
use rnic_abi::abi::queue::{SendFlags, SendOpcode, Sge};
use rnic_abi::types::{Access, Stag, TerminateOrigin};

/// Difference between the memory of the played side and the memory that its traffic suggests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    None,
    /// The peer's last message addresses memory that does not exist.
    Unknown,
    /// Its regions grant these rights instead of those that the peer needs.
    Rights(Access),
    /// There is no receive for the peer's last message.
    RnrPolicy,
    /// The receive for the peer's last message is a byte too short.
    ShortReceive,
}

/// Result of a replay.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Start-up frames and messages that differ, ours and the recorded ones, as text.
    pub differences: Vec<[String; 2]>,
    /// The end of the connection: events after `established`, without headers, and requests whose
    /// result differs from the recording.
    pub end: Vec<String>,
    /// Number of our bytes after the start-up frame that are as recorded.
    pub same: usize,
}

/// Number of the first receive; requests are numbered from 0.
const RECEIVES: u64 = 1000;

/// Plays one side of a connection.
pub fn play(talk: &Conversation, us: Side, flaw: Flaw, cuts: Cuts) -> Outcome {
    let mut outcome = Outcome::default();
    let Some((ours, peer)) = start_up(talk, us, &mut outcome) else { return outcome };
    let mut stage = Stage::new(talk, us, flaw, ours.clone(), &peer);
    for pipe in &mut stage.w.links[stage.raw.link].pipes {
        pipe.cuts = cuts.clone();
    }
    stage.run(talk, us);
    stage.compare_with_recording(talk, us, ours.crc, &mut outcome);
    outcome
}

/// Plays start-up. Returns the negotiated parameters of both ends, if it succeeds.
fn start_up(
    talk: &Conversation,
    us: Side,
    outcome: &mut Outcome,
) -> Option<(Negotiated, Negotiated)> {
    let request = parse(FrameKind::Request, &talk.request);
    let reply = parse(FrameKind::Reply, &talk.reply);
    let as_recorded = |frame: &Repr<'_>| Options {
        revision: frame.revision.max(1),
        crc: frame.crc,
        markers: frame.markers,
        rdmac: false,
        peer_to_peer: frame.enhanced.is_some_and(|e| e.peer_to_peer),
        ird: frame.enhanced.map_or(16, |e| e.ird),
        ord: frame.enhanced.map_or(16, |e| e.ord),
        rtr: RtrKinds::all(),
    };
    let active = as_recorded(&request);
    let passive = as_recorded(&reply);
    let mut initiator = Initiator::new(&active, request.private_data).unwrap();
    let mut responder = Responder::new(&passive);
    let mut compare = |ours: &[u8], theirs: &[u8], kind| {
        if ours != theirs {
            let words = [ours, theirs].map(|frame| parse(kind, frame).to_string());
            outcome.differences.push(words);
        }
    };
    // Our side gets the recorded frames, the peer's side gets ours.
    let (heard, answered) = match us {
        Side::Responder => (talk.request.clone(), None),
        Side::Initiator => {
            compare(initiator.request(), &talk.request, FrameKind::Request);
            (initiator.request().to_vec(), Some(&talk.reply))
        }
    };
    let asked = match responder.handle_input(&heard) {
        Ok(ResponderStep::Request(asked)) => asked,
        Ok(ResponderStep::NeedMore) => panic!("a whole Request"),
        Err(error) => {
            compare(error.last_frame(), &talk.reply, FrameKind::Reply);
            outcome.end.push(error.to_string());
            return None;
        }
    };
    if us == Side::Responder {
        check_request(&asked, &request);
        if reply.reject {
            let ours = responder.reject(reply.private_data).unwrap();
            compare(&ours, &talk.reply, FrameKind::Reply);
            outcome.end.push("rejected".into());
            return None;
        }
    }
    let ird = passive.ird;
    let ord = passive.ord;
    let (ours, n) = responder.accept(Some(ird), Some(ord), ird, ord, reply.private_data).unwrap();
    if us == Side::Responder {
        compare(&ours, &talk.reply, FrameKind::Reply);
    }
    match initiator.handle_input(answered.unwrap_or(&ours)) {
        Ok(InitiatorStep::Accepted(m)) if us == Side::Initiator => Some((m, n)),
        Ok(InitiatorStep::Accepted(m)) => Some((n, m)),
        Ok(InitiatorStep::Rejected { private_data }) => {
            outcome.end.push(format!("rejected: {}", private_data.escape_ascii()));
            None
        }
        Ok(InitiatorStep::NeedMore) => panic!("a whole Reply"),
        Err(error) => {
            outcome.end.push(error.to_string());
            None
        }
    }
}

fn parse(kind: FrameKind, frame: &[u8]) -> Repr<'_> {
    match Frame::check(kind, 2, frame) {
        // Nothing follows the frame.
        Ok(Progress::Complete(found, [])) => Repr::parse(&found),
        other => panic!("{other:?}"),
    }
}

/// Checks the fields of the Request that the application gets.
fn check_request(asked: &ConnectRequest, request: &Repr<'_>) {
    assert_eq!(asked.private_data, request.private_data);
    assert_eq!(asked.revision, request.revision);
    assert_eq!(asked.peer_ird, request.enhanced.map(|e| e.ird));
    assert_eq!(asked.peer_ord, request.enhanced.map(|e| e.ord));
    assert_eq!(asked.peer_to_peer, request.enhanced.is_some_and(|e| e.peer_to_peer));
}

/// A world with one QP and the memory of the recording.
struct Stage {
    w: World,
    raw: Raw,
    /// Regions of our side, by STag.
    regions: HashMap<Stag, Mr>,
    /// Sinks of the peer's Sends.
    inboxes: Vec<Mr>,
    /// Recorded Read Responses of our side whose requests have not arrived yet.
    answers: VecDeque<Message>,
    /// Posted Reads, each with its recorded response.
    reads: Vec<(u64, Message)>,
    posted: Vec<(u64, Message)>,
    /// True if the engine itself sends our next message.
    ready_first: bool,
}

impl Stage {
    fn new(
        talk: &Conversation,
        us: Side,
        flaw: Flaw,
        ours: Negotiated,
        peer: &Negotiated,
    ) -> Stage {
        let mut w = World::new(&[1]);
        let app = w.app(0);
        let cq = w.cq(app, 512);
        let shape = QpShape { sq: 128, rq: 128, ..QpShape::default() };
        let qp = w.qp(app, cq, cq, shape);
        assert_eq!(qp, A);
        w.emss = talk.emss;
        let mut regions = HashMap::new();
        for (stag, range) in ranges(talk, us, flaw) {
            let access = match flaw {
                Flaw::Rights(access) => access,
                _ => Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
            };
            let len = (range.end - range.start) as usize;
            regions.insert(stag, w.mr_as(A, stag, range.start, len, access));
        }
        let sends: Vec<usize> =
            talk.messages(us.other()).filter(|m| m.sends()).map(|m| m.payload.len()).collect();
        let mut inboxes = Vec::new();
        for (n, len) in sends.iter().enumerate() {
            let room = match flaw {
                Flaw::RnrPolicy if n + 1 == sends.len() => break,
                Flaw::ShortReceive if n + 1 == sends.len() => len - 1,
                _ => *len,
            };
            let inbox = w.any_mr(A, room);
            w.recv(A, RECEIVES + n as u64, &[inbox.all()]);
            inboxes.push(inbox);
        }
        let ready_first = us == Side::Initiator && ours.peer_to_peer;
        let raw = w.connect_negotiated(A, ours, peer);
        let responses = |side| {
            talk.messages(side).filter(|m| m.opcode == Opcode::ReadResponse).cloned().collect()
        };
        Stage {
            w,
            raw,
            regions,
            inboxes,
            answers: responses(us),
            reads: Vec::new(),
            posted: Vec::new(),
            ready_first,
        }
    }

    /// Plays the recording.
    fn run(&mut self, talk: &Conversation, us: Side) {
        let mut responses: VecDeque<Message> = talk
            .messages(us.other())
            .filter(|m| m.opcode == Opcode::ReadResponse)
            .cloned()
            .collect();
        for (side, act) in &talk.acts {
            match act {
                Act::Sent { complete, .. } if *side == us => {
                    for message in complete {
                        if !std::mem::take(&mut self.ready_first) {
                            self.post(message, &mut responses);
                        }
                    }
                }
                Act::Sent { bytes, complete } => self.feed(bytes, complete),
                Act::Finished if *side == us => self.w.disconnect(A),
                Act::Finished => self.raw.finish(&mut self.w),
                Act::Reset if *side == us => self.w.abort(A),
                Act::Reset => self.raw.reset(&mut self.w),
            }
        }
    }

    /// Handles a recorded message of our side: posts the request that caused it, unless it was a
    /// response or Terminate.
    fn post(&mut self, message: &Message, responses: &mut VecDeque<Message>) {
        let id = self.posted.len() as u64;
        let wr = match message.opcode {
            Opcode::ReadResponse | Opcode::Terminate => return,
            Opcode::ReadRequest => {
                let request = message.read_request().unwrap();
                let sge = Sge {
                    addr: request.sink_to.0,
                    length: request.size,
                    lkey: request.sink_stag.0,
                };
                if let Some(response) = responses.pop_front() {
                    self.reads.push((id, response));
                }
                Wr::new(SendOpcode::Read, id, &[sge]).remote(request.src_stag, request.src_to.0)
            }
            _ => {
                let source = self.w.any_mr(A, message.payload.len());
                source.set(&message.payload);
                let sges = if source.len == 0 { vec![] } else { vec![source.all()] };
                let wr = match (message.tagged(), message.invalidates()) {
                    (Some((stag, to)), _) => Wr::new(SendOpcode::Write, id, &sges).remote(stag, to),
                    (None, Some(stag)) => Wr::send_invalidate(id, &sges, stag),
                    (None, None) => Wr::send(id, &sges),
                };
                if message.solicits() { wr.with(SendFlags::SOLICITED) } else { wr }
            }
        };
        self.posted.push((id, message.clone()));
        self.w.post(A, &[wr]);
    }

    /// Handles recorded bytes of the peer.
    fn feed(&mut self, bytes: &[u8], complete: &[Message]) {
        for request in complete.iter().filter_map(Message::read_request) {
            let Some(answer) = self.answers.pop_front() else { continue };
            if request.size > 0 {
                let region = &self.regions[&request.src_stag];
                let at = (request.src_to.0 - region.iova) as usize;
                region.mapping.write(at, &answer.payload).unwrap();
            }
        }
        self.raw.bytes(&mut self.w, bytes);
        if self.w.diagnoses(A).is_empty() {
            for message in complete {
                self.placed(message);
            }
        }
    }

    /// Checks that a tagged message was placed.
    fn placed(&self, message: &Message) {
        let Some((stag, to)) = message.tagged() else { return };
        if message.payload.is_empty() {
            return;
        }
        let region = &self.regions[&stag];
        let mut bytes = vec![0; message.payload.len()];
        region.mapping.read((to - region.iova) as usize, &mut bytes).unwrap();
        assert!(bytes == message.payload, "{}", message.words());
    }

    /// Compares the engine's messages and results with the recorded ones.
    fn compare_with_recording(
        &mut self,
        talk: &Conversation,
        us: Side,
        crc: bool,
        outcome: &mut Outcome,
    ) {
        let mut events = self.w.events(A);
        if events.first().is_some_and(|e| e.starts_with("established")) {
            events.remove(0);
        } else {
            events.insert(0, "never established".into());
        }
        // The headers enclosed in a Terminate are compared with the message.
        let without =
            |e: String| e.split(' ').filter(|w| w.len() < 32).collect::<Vec<_>>().join(" ");
        outcome.end = events.into_iter().map(without).collect();
        self.completions(talk, us, outcome);
        if let Some(said) = talk.messages(us.other()).find(|m| m.opcode == Opcode::Terminate) {
            self.reported(said, outcome);
        }

        let ours = MessageReader::new(crc).feed(&self.w.links[self.raw.link].pipes[0].log);
        let theirs: Vec<&Message> = talk.messages(us).collect();
        for n in 0..ours.len().max(theirs.len()) {
            let words = |m: Option<&Message>| m.map_or("nothing".to_owned(), Message::words);
            match (ours.get(n), theirs.get(n).copied()) {
                (Some(a), Some(b)) if a.bytes == b.bytes => outcome.same += a.bytes.len(),
                (Some(a), Some(b)) if a.words() == b.words() => {
                    outcome.differences.push([a, b].map(Message::hex));
                }
                (a, b) => outcome.differences.push([words(a), words(b)]),
            }
        }
    }

    /// Checks that the peer's Terminate is reported with its code and its layout.
    fn reported(&self, said: &Message, outcome: &Outcome) {
        let t = Terminate::parse(&said.payload).unwrap();
        assert_eq!(t.layout, Layout::Siw);
        assert_eq!(t.to_vec().len(), said.payload.len(), "nothing after the headers");
        assert_eq!(outcome.end[0], format!("terminated by peer {}", t.code.number()));
        let why = self.w.diagnosis(A);
        assert_eq!(
            why.what,
            DiagnosisKind::Terminate { origin: TerminateOrigin::Peer, code: t.code }
        );
        assert!(why.text.contains("written as Linux siw does"), "{}", why.text);
    }

    /// Checks that every request completed and every Send arrived. Adds the exceptions to the
    /// outcome.
    fn completions(&mut self, talk: &Conversation, us: Side, outcome: &mut Outcome) {
        let mut expected = BTreeMap::new();
        for (id, message) in &self.posted {
            let response = self.reads.iter().find(|(of, _)| of == id).map(|(_, m)| m);
            let words = match (message.opcode, response) {
                (Opcode::Write, _) => format!("{id} RdmaWrite"),
                (Opcode::ReadRequest, Some(m)) if m.payload.is_empty() => format!("{id} RdmaRead"),
                (Opcode::ReadRequest, Some(m)) => format!("{id} RdmaRead {}", m.payload.len()),
                (Opcode::ReadRequest, None) => format!("{id} RdmaRead unanswered"),
                _ => format!("{id} Send"),
            };
            expected.insert(*id, words);
        }
        for (n, message) in talk.messages(us.other()).filter(|m| m.sends()).enumerate() {
            let id = RECEIVES + n as u64;
            let mut words = format!("{id} Receive");
            if !message.payload.is_empty() {
                words += &format!(" {}", message.payload.len());
            }
            if message.solicits() {
                words += " solicited";
            }
            if let Some(stag) = message.invalidates() {
                words += &format!(" invalidated {:#x}", stag.0);
            }
            expected.insert(id, words);
        }
        for words in self.w.completions(A) {
            let id: u64 = words.split(' ').next().unwrap().parse().unwrap();
            if expected.get(&id) != Some(&words) {
                outcome.end.push(words);
            } else if id >= RECEIVES {
                let n = (id - RECEIVES) as usize;
                let message = talk.messages(us.other()).filter(|m| m.sends()).nth(n).unwrap();
                assert_eq!(self.inboxes[n].bytes(), message.payload);
            }
            expected.remove(&id);
        }
        outcome.end.extend(expected.into_values().map(|words| format!("not completed: {words}")));
    }
}

/// Returns the memory of our side by STag: all memory that its peer accesses successfully, that it
/// reads into, and that it advertised.
fn ranges(talk: &Conversation, us: Side, flaw: Flaw) -> BTreeMap<Stag, std::ops::Range<u64>> {
    let mut found: BTreeMap<Stag, std::ops::Range<u64>> = BTreeMap::new();
    let mut add = |stag: Stag, to: u64, len: u64| {
        let range = found.entry(stag).or_insert(to..to + len);
        *range = range.start.min(to)..range.end.max(to + len);
    };
    let theirs: Vec<&Message> = talk.messages(us.other()).collect();
    let unknown = usize::from(flaw == Flaw::Unknown);
    for message in &theirs[..theirs.len() - unknown] {
        if let (Some((stag, to)), false) = (message.tagged(), message.payload.is_empty()) {
            add(stag, to, message.payload.len() as u64);
        }
        if let Some(request) = message.read_request().filter(|r| r.size > 0) {
            add(request.src_stag, request.src_to.0, request.size.into());
        }
    }
    for request in talk.messages(us).filter_map(Message::read_request).filter(|r| r.size > 0) {
        add(request.sink_stag, request.sink_to.0, request.size.into());
    }
    if us == Side::Responder
        && let private_data = parse(FrameKind::Reply, &talk.reply).private_data
        && let Ok(advertised) = <&[u8; 16]>::try_from(private_data)
    {
        let word = |at: usize| u32::from_be_bytes(advertised[at..at + 4].try_into().unwrap());
        let address = u64::from_be_bytes(advertised[..8].try_into().unwrap());
        add(Stag(word(8)), address, word(12).into());
    }
    found
}
