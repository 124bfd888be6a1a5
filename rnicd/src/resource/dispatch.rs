//! Dispatches requests from clients, and reports from other threads and the connection manager.

use std::sync::atomic::Ordering::Relaxed;

use rnic_abi::abi::control::{ObjectRef, Refusal, ReplyBody, RequestBody, RequestKind};
use rnic_abi::roce::PortSpace;
use rnic_abi::types::*;
use rnic_core::engine::Notification;

use crate::cm::{AcceptParams, BindTo, ConnectParams, RcAcceptParams};
use crate::reaper::Passed;
use crate::resource::answer::{Answer, Outcome, Refused};
use crate::resource::qp::{ConnectOver, RcRequest, space_of_rc};
use crate::resource::{Manager, Pending, find, refuse};

impl Manager {
    /// Carries out a request. `descriptor` was passed with the request. The caller has checked its
    /// kind, except for attached memory.
    pub fn request(
        &mut self,
        id: SessionId,
        body: RequestBody,
        descriptor: Option<Passed>,
        now: Time,
    ) -> Result<Outcome, Refused> {
        self.renew_outdated(id);
        let asked = body.info();
        if asked.kind != RequestKind::Query {
            self.note_opening(id);
        }
        let injected = self.verb_fault(id, &asked, now);
        let answer = injected.unwrap_or_else(|| {
            let answer = if self.draining && asked.kind == RequestKind::Create {
                Err(Refusal::Draining)
            } else {
                self.dispatch(id, body, descriptor, now)
            };
            answer.map_err(|refusal| self.refused(id, asked, refusal, now))
        });
        self.settle();
        answer
    }

    fn dispatch(
        &mut self,
        id: SessionId,
        body: RequestBody,
        descriptor: Option<Passed>,
        now: Time,
    ) -> Answer {
        use RequestBody as R;
        let passed = || descriptor.ok_or_else(refuse::lost_descriptor);
        self.check_device_of(id, &body)?;
        //= DDP-8.3.2-2, RDMAP-8.1.2-2
        match body {
            R::QueryDevice => self.device(id),
            R::OpenPd { name } => self.open_pd(id, name.as_deref()),
            R::ClosePd { pd } => self.close_pd(id, pd),
            R::AddSharedBuffer { length } => self.add_shared_buffer(id, length, passed()?),
            R::RemoveSharedBuffer { buffer } => self.remove_shared_buffer(id, buffer),
            R::RegMr(request) => self.reg_mr(id, &request),
            R::DeregMr { mr } => self.dereg_mr(id, mr),
            R::CreateChannel => self.create_channel(id),
            R::DestroyChannel { channel } => self.destroy_channel(id, channel),
            R::CreateCq { entries, channel, context } => {
                self.create_cq(id, entries, channel, context)
            }
            R::DestroyCq { cq } => self.destroy_cq(id, cq),
            R::CreateQp(request) => self.create_qp(id, &request),
            R::QpToError { qp } => self.qp_to_error(id, qp),
            R::DestroyQp { qp } => self.destroy_qp(id, qp),
            R::QueryQp { qp } => self.query_qp(id, qp),
            R::Bind { address, context, v6_only } => {
                self.bind(id, None, BindTo { address, v6_only }, context, now)
            }
            R::Listen { listener, backlog } => self.listen(id, listener, backlog),
            R::CloseListener { listener } => self.close_listener(id, listener, now),
            R::Accept { request, qp, ird, ord, private_data } => {
                self.accept(id, AcceptParams { request, qp, ird, ord, private_data }, now)
            }
            R::Reject { request, private_data } => self.reject(id, request, &private_data, now),
            R::Connect { qp, peer, local, ird, ord, private_data } => {
                let session = id;
                let peer_to_peer = self.config.mpa.peer_to_peer;
                let params = ConnectParams {
                    session,
                    qp,
                    peer,
                    local,
                    ird,
                    ord,
                    private_data,
                    peer_to_peer,
                };
                self.connect(id, params, now)
            }
            R::Disconnect { qp, mode } => self.disconnect(id, qp, mode, now),
            R::SetContext { object, context } => self.set_context(id, object, context),
            R::Status => self.status(id),
            R::List { what, from } => self.list(id, what, from),
            R::AllocWindow { pd, kind } => self.alloc_window(id, pd, kind),
            R::DeallocWindow { window } => self.dealloc_window(id, window),
            R::CreateSrq(request) => self.create_srq(id, &request),
            R::ArmSrq { srq, limit } => self.arm_srq(id, srq, limit),
            R::QuerySrq { srq } => self.query_srq(id, srq),
            R::DestroySrq { srq } => self.destroy_srq(id, srq),
            R::ServeCopies { worker } => self.serve_copies(id, worker),
            R::AttachMemory => self.attach_memory(id, passed()?),
            R::ConnectOver { qp, ird, ord, private_data } => {
                self.connect_over(id, ConnectOver { qp, ird, ord, private_data }, passed()?, now)
            }
            R::ServeOver { context } => self.serve_over(id, context, passed()?, now),
            R::AdminDisconnect { qp } => self.admin_disconnect(id, qp),
            R::Drain { on } => self.drain(id, on),
            R::Diagnosis { id: number } => self.why(id, number),
            R::ReserveSharedBuffer { length } => self.reserve_shared_buffer(id, length),
            R::FillSharedBuffer { buffer } => self.fill_shared_buffer(id, buffer, passed()?),
            R::ResizeCq { cq, entries } => self.resize_cq(id, cq, entries),
            R::ModifyQp { qp, change } => self.modify_qp(id, qp, &change, now),
            R::QueryGids => self.query_gids(),
            R::ReregMr { mr, to } => self.rereg_mr(id, mr, &to),
            R::BindDatagrams { address, context, v6_only } => {
                let to = BindTo { address, v6_only };
                self.bind(id, Some(PortSpace::Udp), to, context, now)
            }
            R::BindRc { space, address, context, v6_only } => {
                let space = space_of_rc(space)?;
                self.bind(id, Some(space), BindTo { address, v6_only }, context, now)
            }
            R::ConnectRc { qp, space, peer, local, offer, private_data } => {
                let wanted = RcRequest { qp, space, peer, local, offer, private_data };
                self.connect_rc(id, wanted, now)
            }
            R::AcceptRc { request, qp, offer, private_data } => {
                let guid = self.guid.number();
                let kind = None;
                let params = RcAcceptParams { request, qp, kind, offer, guid, private_data };
                self.accept_rc(id, params, now)
            }
            R::EstablishRc { qp } => self.establish_rc(id, qp, now),
            R::AddDevice { name, interface } => self.add_device(id, name, interface),
            R::RemoveDevice { name } => self.remove_device(id, &name),
            R::SetFaults { rules, own } => self.set_faults(id, &rules, own, now),
            R::ClearFaults { name } => self.clear_faults(id, name.as_deref(), now),
            // No rule selects the call, so the library continues with it.
            R::Call(_) => Outcome::done(),
        }
    }

    fn set_context(&mut self, id: SessionId, object: ObjectRef, context: u64) -> Answer {
        let session = find(&mut self.sessions, id)?;
        match object {
            ObjectRef::Qp(qp) => session.qp(qp)?.shared.context.store(context, Relaxed),
            ObjectRef::Cq(cq) => session.cq(cq)?.cq.context.store(context, Relaxed),
            ObjectRef::Listener(listener) => session.listener(listener)?.context = context,
            ObjectRef::Srq(srq) => session.srq(srq)?.srq.context.store(context, Relaxed),
        }
        Outcome::done()
    }

    /// Processes reports from other threads and the connection manager.
    pub fn settle(&mut self) {
        let datagrams = self.workers.take_management();
        // Must precede the management datagrams: a worker's report of the peer's first message
        // replaces a lost RTU, even if DREQ has arrived too.
        self.handle_notifications();
        self.handle_management(datagrams);
        while let Some(event) = self.cm.poll_event() {
            self.handle_cm_event(event);
        }
        self.refresh_stale_faults();
        while let Some(ticket) = self.workers.poll_done() {
            match self.pending.remove(&ticket) {
                Some(Pending::RegMr { session, mr, stag }) => {
                    self.outbox.answer(session, ReplyBody::Mr { mr, stag });
                }
                Some(Pending::DeregMr { session, mr }) => self.mr_revoked(session, mr),
                Some(Pending::ReregMr { session, mr, next }) => {
                    self.install_next_region(session, mr, *next);
                }
                Some(Pending::DestroyQp { session, qp }) => {
                    self.qp_gone(session, qp);
                    self.outbox.answer(session, ReplyBody::Done);
                }
                Some(Pending::ResetQp { session, qp }) => self.qp_was_reset(session, qp),
                Some(Pending::ModifyQp { session }) => {
                    self.outbox.answer(session, ReplyBody::Done);
                }
                Some(Pending::Disconnected { session }) => {
                    if let Ok(session) = find(&mut self.sessions, session) {
                        session.release_events(ticket);
                    }
                }
                Some(Pending::AllocWindow { session, window, stag }) => {
                    self.outbox.answer(session, ReplyBody::Window { window, stag });
                }
                Some(Pending::DeallocWindow { session, window }) => {
                    self.window_gone(session, window);
                }
                Some(Pending::Detach { session }) => self.detached(session),
                Some(Pending::Alive) => self.alive = true,
                None => {}
            }
        }
        while let Some(receipt) = self.reaper.poll_gone() {
            if let Some(session) = self.unmapping.remove(&receipt) {
                self.shared_buffer_gone(session);
            }
        }
    }

    /// Handles the notifications of the workers.
    fn handle_notifications(&mut self) {
        while let Some(notification) = self.workers.poll_notification() {
            match notification {
                Notification::Misbehaved { session, why } => self.outbox.end(session, why),
                Notification::StagGuessed { session, peer, at } => {
                    self.cm.stag_guessed(session, peer, at);
                }
                Notification::CqFailed(cq) => {
                    let owner = self.handles.cqs.owner(cq.0);
                    self.note("cq_failed", owner, format!("completion queue {cq} has failed"));
                    self.cq_failed(cq);
                }
                Notification::Note { session, kind, text } => {
                    self.note(kind, Some(session), text);
                }
                Notification::SrqFailed(srq) => {
                    let owner = self.handles.srqs.owner(srq.0);
                    let text = format!("shared receive queue {srq} has failed");
                    self.note("srq_failed", owner, text);
                    self.srq_failed(srq);
                }
                Notification::Detached { session } => self.memory_gone(session),
                Notification::FaultStruck { fault, qp } => self.fault_struck(fault, qp),
                Notification::Unlinked { qp } => self.unlinked(qp),
                Notification::CommunicationEstablished { qp } => {
                    self.cm.communication_established(qp);
                }
            }
        }
    }
}
