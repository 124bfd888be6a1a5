//! Rules in the file: arrays of tables.

use serde::Deserialize;
use toml::Spanned;

use super::addresses::{Network, Ports};
use super::field::Field;
use super::file_limits::{self, Fields};
use super::subjects::{Id, Subjects};

/// `[[user]]` and `[[group]]`: different limits and rights for a user or a group.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverrideTable {
    /// The user or group to which the table applies.
    pub who: Spanned<Id>,
    /// Workers may copy from and to the user's attached memory themselves.
    pub trusted: Option<bool>,
    /// The user may pass its own TCP sockets.
    pub sockets: Option<bool>,
    /// Programs in other network namespaces may use addresses that stay on the host.
    pub host_loopback: Option<bool>,
    /// Values that replace `[limits.session]`.
    #[serde(default, deserialize_with = "file_limits::of_session")]
    pub session: Fields,
    /// Values that replace `[limits.user]`.
    #[serde(default, deserialize_with = "file_limits::of_user")]
    pub user: Fields,
}

/// `[[pd]]`: a protection domain that sessions may share.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PdTable {
    /// Name by which clients open the domain.
    pub name: Spanned<String>,
    /// Users that may open it.
    #[serde(default)]
    pub users: Vec<Id>,
    /// Groups; their members may open it.
    #[serde(default)]
    pub groups: Vec<Id>,
    /// Maximum sessions that have it open.
    pub max_sessions: Field<u32>,
    /// Maximum memory regions in it.
    pub mrs: Field<u32>,
    /// Maximum QPs in it.
    pub qps: Field<u32>,
}

/// `[[listen]]`: allows users to listen on addresses.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenTable {
    /// Users and groups that may listen.
    pub who: Subjects,
    /// Addresses on which they may listen.
    pub address: Network,
    /// Ports; default any.
    #[serde(default)]
    pub ports: Ports,
}

/// `[[connect]]`: allows users to connect to addresses.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectTable {
    /// Users and groups that may connect.
    pub who: Subjects,
    /// Addresses of peers to which they may connect.
    pub network: Network,
    /// Ports of peers; default any.
    #[serde(default)]
    pub ports: Ports,
}
