//! Rules as they are written: arrays of tables that may occur any number of times.

use serde::Deserialize;
use toml::Spanned;

use super::addresses::{Network, Ports};
use super::field::Field;
use super::file_limits::{self, Fields};
use super::subjects::{Id, Subjects};

/// `[[user]]` and `[[group]]`: other limits and rights for some.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OverrideTable {
    /// The user or group to which the table applies.
    pub who: Spanned<Id>,
    /// Whether the daemon may copy in the user's own address space by itself.
    pub trusted: Option<bool>,
    /// Whether the user may pass TCP sockets of its own.
    pub sockets: Option<bool>,
    /// Whether programs in other network namespaces may use addresses that stay on the host.
    pub host_loopback: Option<bool>,
    /// Instead of `[limits.session]`.
    #[serde(default, deserialize_with = "file_limits::of_session")]
    pub session: Fields,
    /// Instead of `[limits.user]`.
    #[serde(default, deserialize_with = "file_limits::of_user")]
    pub user: Fields,
}

/// `[[pd]]`: a protection domain that sessions may share.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PdTable {
    /// Name by which clients open the domain.
    pub name: Spanned<String>,
    /// Users who may open it.
    #[serde(default)]
    pub users: Vec<Id>,
    /// Groups whose members may open it.
    #[serde(default)]
    pub groups: Vec<Id>,
    /// Sessions that may have it open.
    pub max_sessions: Field<u32>,
    /// Memory regions in it.
    pub mrs: Field<u32>,
    /// Queue pairs in it.
    pub qps: Field<u32>,
}

/// `[[listen]]`: who may listen where.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ListenTable {
    /// Users and groups that may listen.
    pub who: Subjects,
    /// Addresses on which they may listen.
    pub address: Network,
    /// Ports; any without it.
    #[serde(default)]
    pub ports: Ports,
}

/// `[[connect]]`: who may connect where.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectTable {
    /// Users and groups that may connect.
    pub who: Subjects,
    /// Addresses of peers to which they may connect.
    pub network: Network,
    /// Ports of peers; any without it.
    #[serde(default)]
    pub ports: Ports,
}
