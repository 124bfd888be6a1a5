//! What goes on between this daemon and others for queue pairs that are wired by hand.

use std::collections::{BTreeSet, HashMap};

use rnic_core::stream::introduction::Introduction;
use rnic_core::types::*;

use crate::resource::numbers::Handle;

/// The port at which others find queue pairs of this daemon, and what goes on there.
#[derive(Default)]
pub struct Rendezvous {
    pub listeners: Vec<(ListenerId, Handle)>,
    /// Why others find nobody here.
    pub deaf: Option<String>,
    /// Requests for queue pairs that have not been told of a peer.
    pub held: HashMap<RequestId, Introduction>,
    /// When queue pairs dial, for the first time or once more.
    pub dials: BTreeSet<(Time, QpId)>,
}
