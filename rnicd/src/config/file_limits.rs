//! Limits as they are written: totals that exist for the device, for a user and for a session
//! alike, and what only one of them has.

use serde::Deserialize;

use super::file::Field;
use super::units::Size;

/// Defines a section that has every total and some keys of its own. Serde's `flatten` would do the
/// same, but takes away both the refusal of unknown keys and the place of each value.
macro_rules! section_with_totals {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$doc])*
        #[derive(Debug, Default, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
            /// Protection domains.
            pub pds: Field<u32>,
            /// Segments.
            pub segments: Field<u32>,
            /// Bytes of segments.
            pub segment_bytes: Field<Size>,
            /// Memory regions.
            pub mrs: Field<u32>,
            /// Memory windows.
            pub windows: Field<u32>,
            /// Completion channels.
            pub channels: Field<u32>,
            /// Completion queues.
            pub cqs: Field<u32>,
            /// Entries of all completion queues together.
            pub cq_entries_total: Field<u32>,
            /// Queue pairs.
            pub qps: Field<u32>,
            /// Shared receive queues.
            pub srqs: Field<u32>,
            /// Bound addresses.
            pub listeners: Field<u32>,
            /// Bytes of arenas.
            pub arena_bytes: Field<Size>,
        }

        impl $name {
            /// Takes out the totals.
            pub fn totals(&mut self) -> TotalsFields {
                TotalsFields {
                    pds: self.pds.take(),
                    segments: self.segments.take(),
                    segment_bytes: self.segment_bytes.take(),
                    mrs: self.mrs.take(),
                    windows: self.windows.take(),
                    channels: self.channels.take(),
                    cqs: self.cqs.take(),
                    cq_entries_total: self.cq_entries_total.take(),
                    qps: self.qps.take(),
                    srqs: self.srqs.take(),
                    listeners: self.listeners.take(),
                    arena_bytes: self.arena_bytes.take(),
                }
            }
        }
    };
}

/// Totals of any section.
pub struct TotalsFields {
    /// Protection domains.
    pub pds: Field<u32>,
    /// Segments.
    pub segments: Field<u32>,
    /// Bytes of segments.
    pub segment_bytes: Field<Size>,
    /// Memory regions.
    pub mrs: Field<u32>,
    /// Memory windows.
    pub windows: Field<u32>,
    /// Completion channels.
    pub channels: Field<u32>,
    /// Completion queues.
    pub cqs: Field<u32>,
    /// Entries of all completion queues together.
    pub cq_entries_total: Field<u32>,
    /// Queue pairs.
    pub qps: Field<u32>,
    /// Shared receive queues.
    pub srqs: Field<u32>,
    /// Bound addresses.
    pub listeners: Field<u32>,
    /// Bytes of arenas.
    pub arena_bytes: Field<Size>,
}

section_with_totals! {
    /// `[limits]`: the whole device, and maxima of single objects.
    LimitsSection {
        /// Sessions.
        sessions: Field<u32>,
        /// Connections in start-up.
        half_open: Field<u32>,
        /// Entries of one CQ.
        cq_entries: Field<u32>,
        /// Requests of one queue.
        wr_depth: Field<u32>,
        /// Elements of one request.
        sge: Field<u8>,
        /// Inline bytes of one request.
        inline: Field<Size>,
        /// Inbound reads of one QP.
        ird: Field<u16>,
        /// Outbound reads of one QP.
        ord: Field<u16>,
        /// Undecided connection requests of one listener.
        backlog: Field<u32>,
        /// Unread events of one session.
        events: Field<u32>,
        /// *Why* records of the device.
        why: Field<u32>,
        /// Records of notable happenings.
        event_records: Field<u32>,
        /// Mover processes.
        movers: Field<u32>,
        /// Descriptors of clients that wait to be closed.
        closing: Field<u32>,
        /// Bytes of incomplete FPDUs.
        partial_bytes: Field<Size>,
        /// Bytes of incomplete FPDUs of one session.
        session_partial_bytes: Field<Size>,
        /// Bytes that TCP has not taken.
        unsent_bytes: Field<Size>,
        /// Bytes that TCP has not taken, of one session.
        session_unsent_bytes: Field<Size>,
        /// Bytes of kernel memory for what one connection has to send.
        socket_send_bytes: Field<Size>,
        /// Bytes of kernel memory for what one connection has received.
        socket_receive_bytes: Field<Size>,
        /// `[limits.user]`
        user: UserLimitsSection,
        /// `[limits.session]`
        session: SessionLimitsSection,
        /// `[limits.peer]`
        peer: PeerLimitsSection,
    }
}

section_with_totals! {
    /// `[limits.user]`: the sum of a user's sessions.
    UserLimitsSection {
        /// Sessions.
        sessions: Field<u32>,
        /// Connections in start-up of the user's listeners and programs.
        half_open: Field<u32>,
        /// Connections taken for the user's listeners per second.
        accepts_per_second: Field<u32>,
        /// Connections that the user begins per second.
        connections_per_second: Field<u32>,
        /// Inbound reads of all QPs together.
        ird: Field<u32>,
        /// Outbound reads of all QPs together.
        ord: Field<u32>,
        /// Processes that copy for the user's attached clients.
        movers: Field<u32>,
        /// Times per second that the user's clients ask for one.
        attachments_per_second: Field<u32>,
        /// Descriptors of the user's clients that wait to be closed.
        closing: Field<u32>,
    }
}

section_with_totals! {
    /// `[limits.session]`: one session.
    SessionLimitsSection {
        /// *Why* records of one session.
        why: Field<u32>,
    }
}

/// `[limits.peer]`: one remote host.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PeerLimitsSection {
    /// Connections that a host begins per second.
    pub connections_per_second: Field<u32>,
    /// Wrong STags that a host names per minute.
    pub stag_guesses_per_minute: Field<u32>,
}
