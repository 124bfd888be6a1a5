//! Options of ids (`rdma_set_option(3)`).

use std::ffi::{c_int, c_void};

use rnic_client::Function;

use super::id::{CmIdBody, cm_id};
use super::service::Service;
use crate::c::*;
use crate::errno::Errno;
use crate::ffi::entry::entry;
use crate::ffi::handles::Live;
use crate::ffi::pointers::{bytes, get};

fn set(
    id: *mut rdma_cm_id,
    level: c_int,
    name: c_int,
    value: *mut c_void,
    length: usize,
) -> Result<(), Errno> {
    let found = cm_id(id)?;
    found.admit(Function::SetOption)?;
    // SAFETY: `value` points to `length` bytes (rdma_set_option(3)), here 1.
    let byte = || unsafe { value.cast::<u8>().read() };
    // SAFETY: as above, here 4.
    let is_on = || unsafe { value.cast::<c_int>().read_unaligned() } != 0;
    match (level, name, length) {
        _ if value.is_null() => Err(errno!(libc::EFAULT, "rdma_set_option: optval is null")),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, 4) => found.id.set_family_only(is_on()),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) if get!(found.qp_type) != IBV_QPT_RC => {
            Err(invalid!("only an RC QP has an acknowledgement timeout"))
        }
        // On the iWARP device the host's TCP settings determine the timeout, and `ibv_query_qp(3)`
        // reports this value.
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) => {
            found.id.set_ack_timeout(byte());
            Ok(())
        }
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 4) => found.id.set_reuses_address(is_on()),
        // On the iWARP device the host's settings determine the TOS as well.
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1) => {
            found.id.state.lock().tos = byte();
            Ok(())
        }
        (
            RDMA_OPTION_ID,
            RDMA_OPTION_ID_AFONLY
            | RDMA_OPTION_ID_ACK_TIMEOUT
            | RDMA_OPTION_ID_REUSEADDR
            | RDMA_OPTION_ID_TOS,
            _,
        ) => Err(invalid!("option {name}: wrong optlen {length}")),
        (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, _)
            if length == 0 || !length.is_multiple_of(PATH_DATA_LEN) =>
        {
            Err(invalid!("RDMA_OPTION_IB_PATH: wrong optlen {length}"))
        }
        (RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, _) if found.id.service != Service::Iwarp => {
            // SAFETY: as above.
            set_path(found, unsafe { bytes(value, length) })
        }
        _ => Err(errno!(libc::ENOSYS, "option {name} of level {level} is not supported")),
    }
}

/// Resolves the route with the first of the paths (`struct ibv_path_data`) that serves both
/// directions. The device has one path to each peer, so only the path MTU and the traffic class
/// have an effect.
fn set_path(id: Live<CmIdBody>, paths: &[u8]) -> Result<(), Errno> {
    let (paths, _) = paths.as_chunks::<PATH_DATA_LEN>();
    let mut usable = paths.iter().filter(|path| path[..4] == USABLE_PATH.to_ne_bytes());
    let path = usable.next().ok_or_else(|| {
        invalid!("RDMA_OPTION_IB_PATH: no path has the flags GMP, PRIMARY and BIDIRECTIONAL")
    })?;
    let most_mtu = match path[PATH_MTU] & 0x3F {
        code @ 1..=5 => Some(128 << code),
        _ => None,
    };
    id.id.resolve_route_with(most_mtu, path[PATH_TRAFFIC_CLASS])
}

/// Bytes of a `struct ibv_path_data`.
const PATH_DATA_LEN: usize = 72;
/// Flags of a path for management, for the connection, and for both directions.
const USABLE_PATH: u32 = 1 | 1 << 1 | 1 << 3 | 1 << 5;
/// Offset of the traffic class.
const PATH_TRAFFIC_CLASS: usize = 8 + 48;
/// Offset of the path MTU, whose upper two bits are a selector.
const PATH_MTU: usize = 8 + 54;

entry! {
    plain rdma_set_option(
        id: *mut rdma_cm_id, level: c_int, name: c_int, value: *mut c_void, length: usize,
    ) -> minus_one = set;
}
