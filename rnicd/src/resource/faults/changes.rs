//! Changes of devices by rules: ports that are down, removed GIDs, other P_Keys and speeds, and
//! removed devices.

use std::collections::HashSet;
use std::sync::Arc;

use rnic_abi::abi::control::{DeviceKind, DeviceRow, Event, NO_GID, Refusal, RequestBody, Wiring};
use rnic_abi::faults::change::Change;
use rnic_abi::faults::{Action, AsyncEvent, FaultRule, Selector};
use rnic_abi::roce::connection::REJECT_DATA;
use rnic_abi::roce::p_key::{DEFAULT_P_KEY, p_keys_match};
use rnic_abi::types::*;
use rnic_core::engine::{DatagramPort, PortChanges, rule_of_fault};

use super::Rule;
use crate::resource::qp::{Qp, RcAttr};
use crate::resource::session::Session;
use crate::resource::{Manager, refuse};
use crate::system;

/// Viewer of a device.
#[derive(Clone, Copy, Debug)]
pub enum Viewer {
    /// A session.
    Session(SessionId),
    /// All readers of the device files. The files show a change only if its rule selects all
    /// programs, either of all users or of the user that the daemon runs as.
    Files,
}

impl Rule {
    /// Returns true if the rule's lasting effect is in force and concerns a device.
    fn has_changed(&self, device: &str) -> bool {
        let select = &self.armed.rule.select;
        self.lasts.is_some() && select.device.as_deref().is_none_or(|name| name == device)
    }

    /// Returns true if the rule's effect is visible to the viewer.
    fn is_seen_by(&self, viewer: Viewer, manager: &Manager) -> bool {
        match viewer {
            Viewer::Session(id) => {
                manager.sessions.get(&id).is_some_and(|session| self.selects(session))
            }
            Viewer::Files => {
                let own = rustix::process::getuid().as_raw();
                self.session.is_none()
                    && self.user.is_none_or(|uid| uid == own)
                    && self.armed.rule.select.selects_all_programs()
            }
        }
    }
}

impl Manager {
    /// Announces a change that a rule has made.
    pub(super) fn begin_change(&mut self, number: u64, change: Change, now: Time) {
        if change == Change::Removal {
            self.remove_devices(number, now);
        } else {
            self.announce(number, change, now);
        }
        self.files_changed(number);
    }

    /// Updates the device files, if they show the effect of a rule.
    pub(super) fn files_changed(&mut self, number: u64) {
        let rule = self.faults.rules.get(&number);
        if rule.is_some_and(|rule| rule.is_seen_by(Viewer::Files, self)) {
            self.port_changed();
        }
    }

    /// Announces the end of a change.
    pub(super) fn end_change(&mut self, number: u64, change: Change, now: Time) {
        if change == Change::Removal {
            for id in self.sessions_of(number, None) {
                if let Some(session) = self.sessions.get(&id) {
                    session.tell(&Event::DevicesChanged);
                }
            }
        } else {
            self.announce(number, change, now);
        }
        self.files_changed(number);
    }

    fn announce(&mut self, number: u64, change: Change, now: Time) {
        let event = match change {
            Change::Gids { .. } => AsyncEvent::GID_CHANGE,
            Change::PKey(_) => AsyncEvent::PKEY_CHANGE,
            // A new speed means that the port has negotiated the link again.
            Change::Speed { .. } => AsyncEvent::PORT_ACTIVE,
            Change::Removal => return,
        };
        self.raise(number, event, None, now);
    }

    /// Removes the devices that a rule selects, for the sessions that it selects.
    fn remove_devices(&mut self, number: u64, now: Time) {
        let Some(rule) = self.faults.rules.get(&number) else { return };
        let name = rule.name();
        let devices = self.devices_of(&rule.armed.rule);
        for id in self.sessions_of(number, None) {
            let Some(session) = self.sessions.get(&id) else { continue };
            for device in &devices {
                session.tell(&Event::DeviceRemoved { device: device.clone() });
            }
            let is_gone = |qp: &Qp| devices.iter().any(|device| self.is_on(qp, device));
            let gone = session.qps.iter().filter(|(_, qp)| is_gone(qp));
            for qp in gone.map(|(id, _)| *id).collect::<Vec<_>>() {
                self.fail_qp(id, qp);
            }
            for device in &devices {
                self.record_fault(id, name, None, &format!("device {device} was removed"), now);
            }
        }
    }

    /// Returns an error if a rule has removed the device of a request that creates, changes or
    /// connects a QP. Existing QPs can be queried and destroyed.
    pub(in crate::resource) fn check_device_of(
        &self,
        id: SessionId,
        body: &RequestBody,
    ) -> Result<(), Refusal> {
        use RequestBody as R;
        if self.faults.rules.is_empty() {
            return Ok(());
        }
        let Some(session) = self.sessions.get(&id) else { return Ok(()) };
        // A RoCE QP without the name of a device and without a GID may belong to another device.
        let is_known = |qp: &&Qp| !qp.device.is_empty() || qp.rc.is_some() || !qp.kind.is_roce();
        let (name, qp) = match body {
            R::CreateQp(request) => (Some(&request.device), None),
            R::ModifyQp { qp, .. }
            | R::QpToError { qp }
            | R::Connect { qp, .. }
            | R::ConnectRc { qp, .. }
            | R::Accept { qp, .. }
            | R::AcceptRc { qp, .. } => (None, session.qps.get(qp).filter(is_known)),
            _ => return Ok(()),
        };
        let is_on =
            |device: &String| name == Some(device) || qp.is_some_and(|qp| self.is_on(qp, device));
        let removes = |rule: &&Rule| {
            let action = rule.armed.rule.action;
            matches!(action, Action::Change { change: Change::Removal, .. })
                && rule.lasts.is_some()
                && rule.selects(session)
                && self.devices_of(&rule.armed.rule).iter().any(is_on)
        };
        let Some(rule) = self.faults.rules.values().find(removes) else { return Ok(()) };
        let error = rustix::io::Errno::IO.into();
        Err(system::refusal(
            &format!("the device is removed, {}", rule_of_fault(rule.name())),
            &error,
        ))
    }

    /// Returns the names of the devices that a rule selects. Actions that only RoCE devices support
    /// do not select the iWARP device.
    pub(super) fn devices_of(&self, rule: &FaultRule) -> Vec<String> {
        let wanted = rule.select.device.as_deref();
        let is_selected = |row: &DeviceRow| {
            wanted.is_none_or(|wanted| wanted == row.name)
                && (row.kind == DeviceKind::Roce || only_roce(rule.action).is_none())
        };
        let selected = self.device_rows().into_iter().filter(is_selected);
        selected.map(|row| row.name).collect()
    }

    /// Returns an error if a user would have too many rules that change devices.
    pub(super) fn check_changes(&self, new: &[Rule]) -> Result<(), Refusal> {
        let is_change = |of: &&Rule| matches!(of.armed.rule.action, Action::Change { .. });
        let Some(owner) = new.iter().find(is_change).map(|rule| rule.owner) else { return Ok(()) };
        let rules = self.faults.rules.values().filter(|rule| rule.owner == owner).chain(new);
        if rules.filter(is_change).count() <= MAX_CHANGES {
            return Ok(());
        }
        let why = format!("user {owner} may have at most {MAX_CHANGES} rules that change devices");
        Err(refuse::invalid("fault rule", why))
    }

    /// Returns an error for an action that the selected device does not support, for private data
    /// that is too long for it, and for a GID index that no selected device has.
    pub(super) fn check_change(&self, rule: &FaultRule) -> Result<(), Refusal> {
        let iwarp = &self.config.device.name;
        if let Some(lacks) = only_roce(rule.action)
            && rule.select.device.as_ref() == Some(iwarp)
        {
            let why = format!("{iwarp} is the iWARP device, which has {lacks}");
            return Err(refuse::invalid("device", why));
        }
        if rule.data.len() > REJECT_DATA && rule.select.device.as_ref() != Some(iwarp) {
            let why = format!(
                "RoCE devices reject with at most {REJECT_DATA} bytes; select device={iwarp} for \
                 more"
            );
            return Err(refuse::invalid("data", why));
        }
        let Action::Change { change: Change::Gids { index: Some(index) }, .. } = rule.action else {
            return Ok(());
        };
        let at = self.row_of_gid(index);
        let devices = self.devices_of(rule);
        let has = |name: &String| self.gids_of(name).get(at).is_some_and(|row| !row.gid.is_zero());
        if devices.is_empty() || devices.iter().any(has) {
            return Ok(());
        }
        let why = format!("{index}: no GID with this index on {}", devices.join(", "));
        Err(refuse::invalid("index", why))
    }

    /// Returns true if a change in effect keeps a QP of a selected session from sending and
    /// receiving.
    pub(super) fn change_stops(
        &self,
        rule: &FaultRule,
        qp: &Qp,
        keys_differ: impl FnOnce() -> bool,
    ) -> bool {
        let Action::Change { change, .. } = rule.action else { return false };
        let device = rule.select.device.as_deref();
        let is_on = || device.is_none_or(|device| self.is_on(qp, device));
        match (change, &qp.rc) {
            (Change::Removal, _) => is_on(),
            (Change::Gids { index }, Some(rc)) => {
                self.takes_gid(&rule.select, index, qp, rc.wiring.local)
            }
            (Change::PKey(_), Some(_)) => is_on() && keys_differ(),
            _ => false,
        }
    }

    /// Returns true if the P_Keys of a QP and its peer do not match.
    pub(super) fn keys_differ(&self, session: &Session, qp: &Qp) -> bool {
        let differ = |rc| !p_keys_match(self.p_key(session, qp), self.p_key_of_peer(rc));
        qp.rc.as_ref().is_some_and(differ)
    }

    /// Returns the P_Key of a QP of a session. All QPs use the P_Key with index 0.
    fn p_key(&self, session: &Session, qp: &Qp) -> u16 {
        let lasting = self.faults.rules.values().filter(|rule| rule.lasts.is_some());
        let key = |rule: &Rule| {
            let FaultRule { action, select, .. } = &rule.armed.rule;
            let Action::Change { change: Change::PKey(key), .. } = *action else { return None };
            let is_on = select.device.as_deref().is_none_or(|device| self.is_on(qp, device));
            (is_on && rule.selects(session)).then_some(key)
        };
        lasting.filter_map(key).next_back().unwrap_or(DEFAULT_P_KEY)
    }

    /// Returns the changes of the ports of a UD QP by rules: lost GIDs and the P_Key.
    pub(super) fn port_changes(&self, session: &Session, qp: &Qp) -> PortChanges {
        let p_key = self.p_key(session, qp);
        let mut lost = HashSet::new();
        let lasting = self.faults.rules.values().filter(|rule| rule.lasts.is_some());
        for rule in lasting.filter(|rule| rule.selects(session)) {
            let FaultRule { select, action, .. } = &rule.armed.rule;
            let Action::Change { change: Change::Gids { index }, .. } = action else { continue };
            let wanted = select.device.as_deref();
            let of_qp = self.roce_gids().filter(|(device, _)| {
                wanted.is_none_or(|wanted| wanted == *device) && self.is_on(qp, device)
            });
            for (_, gids) in of_qp {
                let one = index.map(|index| gids.get(self.row_of_gid(index)));
                let all = one.is_none().then_some(gids).into_iter().flatten();
                lost.extend(one.flatten().into_iter().chain(all).map(|own| own.gid));
            }
        }
        let gids = self.datagram_port.gids.iter().filter(|gid| !gid.is_zero());
        let lost = gids.filter(|gid| lost.contains(*gid)).copied().collect();
        PortChanges { lost, p_key }
    }

    /// Returns the ports of a UD QP with these changes.
    pub(in crate::resource) fn datagram_port_with(
        &self,
        changes: &PortChanges,
    ) -> Arc<DatagramPort> {
        if *changes == PortChanges::default() {
            return self.datagram_port.clone();
        }
        let port = DatagramPort::clone(&self.datagram_port);
        Arc::new(DatagramPort { changes: changes.clone(), ..port })
    }

    /// Returns the P_Key of the peer of a QP: the default one for a QP of another daemon.
    fn p_key_of_peer(&self, rc: &RcAttr) -> u16 {
        let Wiring { remote, remote_qp, .. } = rc.wiring;
        let owner = self.handles.qps.owner(remote_qp.0).filter(|_| self.has_gid(remote));
        let session = owner.and_then(|owner| self.sessions.get(&owner));
        let qp = session.and_then(|session| Some((session, session.qps.get(&remote_qp)?)));
        qp.map_or(DEFAULT_P_KEY, |(session, qp)| self.p_key(session, qp))
    }

    /// Returns all devices as a viewer sees them.
    pub(in crate::resource) fn devices_seen_by(&self, viewer: Viewer) -> Vec<DeviceRow> {
        let mut rows = self.device_rows();
        let rules = self.faults.rules.values().filter(|rule| rule.is_seen_by(viewer, self));
        for rule in rules {
            rows.retain_mut(|row| !rule.has_changed(&row.name) || self.change_row(rule, row));
        }
        rows
    }

    /// Applies the effect of a rule to a row. Returns false if the rule has removed the device.
    fn change_row(&self, rule: &Rule, row: &mut DeviceRow) -> bool {
        let change = match rule.armed.rule.action {
            Action::PortDown { .. } => {
                row.port_down = true;
                return true;
            }
            Action::Change { change, .. } => change,
            _ => return true,
        };
        match change {
            Change::Gids { index } => {
                let only = index.map(|index| self.row_of_gid(index));
                for (at, gid) in row.gids.iter_mut().enumerate() {
                    if only.is_none_or(|only| only == at) {
                        *gid = NO_GID;
                    }
                }
            }
            Change::PKey(key) if row.kind == DeviceKind::Roce => row.p_key = key,
            Change::PKey(_) => {}
            Change::Speed { speed, width } => {
                row.active_speed = speed.unwrap_or(row.active_speed);
                row.active_width = width.unwrap_or(row.active_width);
            }
            Change::Removal => return false,
        }
        true
    }

    /// Returns the row of a device's GID table for a GID index of the verbs API. A profile may show
    /// each row as two entries.
    fn row_of_gid(&self, index: u16) -> usize {
        let entries = if self.config.shown_profile(DeviceKind::Roce).gid_v1 { 2 } else { 1 };
        usize::from(index) / entries
    }

    /// Returns true if a change of GIDs removes this GID from the device of a QP.
    pub(super) fn takes_gid(
        &self,
        select: &Selector,
        index: Option<u16>,
        qp: &Qp,
        gid: Gid,
    ) -> bool {
        let wanted = select.device.as_deref();
        self.roce_gids().any(|(device, gids)| {
            let at = || gids.iter().position(|own| own.gid == gid);
            let is_taken = |at| index.is_none_or(|index| self.row_of_gid(index) == at);
            wanted.is_none_or(|wanted| wanted == device)
                && self.is_on(qp, device)
                && at().is_some_and(is_taken)
        })
    }

    /// Returns true if a change in effect has removed this GID from the device of a QP.
    pub(in crate::resource) fn has_lost_gid(&self, id: SessionId, qp: QpId, gid: Gid) -> bool {
        if self.faults.rules.is_empty() {
            return false;
        }
        let Some(session) = self.sessions.get(&id) else { return false };
        session.qps.get(&qp).is_some_and(|qp| self.has_lost(session, qp, gid))
    }

    fn has_lost(&self, session: &Session, qp: &Qp, gid: Gid) -> bool {
        let lasting = self.faults.rules.values().filter(|rule| rule.lasts.is_some());
        lasting.filter(|rule| rule.selects(session)).any(|rule| {
            let FaultRule { select, action, .. } = &rule.armed.rule;
            matches!(action, Action::Change { change: Change::Gids { index }, .. }
                if self.takes_gid(select, *index, qp, gid))
        })
    }
}

/// Maximum number of rules of a user that change devices, because the manager compares each QP with
/// each of these rules.
const MAX_CHANGES: usize = 16;

/// Returns the property of the iWARP device that excludes an action, if only RoCE devices support
/// the action.
fn only_roce(action: Action) -> Option<&'static str> {
    match action {
        Action::Change { change: Change::Gids { .. } | Change::PKey(_), .. } => {
            Some("one GID and no partitions")
        }
        Action::Rnr { .. } => Some("no RNR NAKs"),
        Action::CmMessage { .. } => Some("MPA frames instead of messages"),
        _ => None,
    }
}
