//! Open devices (`ibv_open_device(3)`) and their attributes.

pub(crate) mod query;

use std::mem::offset_of;
use std::ptr::null_mut;
use std::sync::Arc;

use rnic_client::{DeviceKind, DeviceRow, GidRow};

use crate::c;
use crate::errno::Errno;
use crate::event_queue::EventQueue;
use crate::ffi::handles::{Body, Kind, Live, live, zeroed};
use crate::net;
use crate::verbs::adapter::{Adapter, Gids, copy_name, empty_gid};
use crate::verbs::async_events::AsyncEvents;
use crate::verbs::device::{Device, PORT};

/// Sets the operations of new objects, which inline functions of the C headers call.
pub(crate) struct Operations {
    pub(crate) context: fn(&mut c::verbs_context),
    pub(crate) cq: fn(&mut c::ibv_cq_ex),
    /// Takes the `send_ops_flags` of the QP.
    pub(crate) qp: fn(&mut c::ibv_qp_ex, u64),
}

/// A context. All contexts of a process share one session with the daemon.
pub(crate) struct ContextBody {
    device: Arc<Device>,
    adapter: Arc<Adapter>,
    async_events: Arc<AsyncEvents>,
    operations: &'static Operations,
}

impl Body for ContextBody {
    type Head = c::verbs_context;
    const KIND: Kind = Kind::Context;
}

/// Returns the context of a C pointer, unless its device was unplugged.
pub(crate) fn context(of: *mut c::ibv_context) -> Result<Live<ContextBody>, Errno> {
    let found = any_context(of)?;
    found.adapter.check()?;
    Ok(found)
}

/// Returns the context of a C pointer, which points to the last field of the structure.
pub(crate) fn any_context(of: *mut c::ibv_context) -> Result<Live<ContextBody>, Errno> {
    live(start(of))
}

/// Returns the structure that contains a context, or null for a null pointer.
pub(crate) fn start(of: *mut c::ibv_context) -> *mut c::verbs_context {
    if of.is_null() {
        return null_mut();
    }
    of.wrapping_byte_sub(offset_of!(c::verbs_context, context)).cast()
}

/// Checks that an object belongs to the same context as the object that uses it.
///
/// # Errors
///
/// `EINVAL` otherwise. The kernel likewise accepts only objects of the same file descriptor.
pub(crate) fn check_same(
    what: Kind,
    of: *mut c::ibv_context,
    expected: *mut c::ibv_context,
) -> Result<(), Errno> {
    if of == expected {
        Ok(())
    } else {
        Err(invalid!("the {what} belongs to another device context"))
    }
}

impl ContextBody {
    pub(crate) fn open(
        device: Arc<Device>,
        adapter: Arc<Adapter>,
        operations: &'static Operations,
    ) -> Result<ContextBody, Errno> {
        let async_events = Arc::new(EventQueue::new()?);
        if adapter.kind() == DeviceKind::Roce {
            device.tables()?;
        }
        device.opened(&async_events, &adapter);
        if adapter.is_unplugged() {
            // The device was unplugged in the meantime. The queue may have been registered too late
            // to be closed with the others.
            async_events.close();
        }
        Ok(ContextBody { device, adapter, async_events, operations })
    }

    /// Returns the device of the context.
    pub(crate) fn adapter(&self) -> &Arc<Adapter> {
        &self.adapter
    }

    fn kind(&self) -> DeviceKind {
        self.adapter.kind()
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn operations(&self) -> &'static Operations {
        self.operations
    }

    pub(crate) fn async_events(&self) -> &Arc<AsyncEvents> {
        &self.async_events
    }

    /// Returns identity and limits (`ibv_query_device(3)`).
    pub(crate) fn attributes(&self) -> c::ibv_device_attr {
        let has = &self.device.attributes;
        let most = self.adapter.limits();
        let mut attr: c::ibv_device_attr = zeroed();
        let fw_ver = &most.profile.fw_ver;
        copy_name(&mut attr.fw_ver, if fw_ver.is_empty() { &has.version } else { fw_ver });
        attr.node_guid = self.adapter.guid();
        attr.sys_image_guid = has.guid.to_be();
        attr.max_mr_size = most.profile.max_mr_size;
        // Every power of two from the page size up.
        let page_sizes = !(rustix::param::page_size() as u64 - 1);
        attr.page_size_cap = page_sizes & most.profile.page_size_cap;
        attr.vendor_id = self.adapter.row().vendor_id;
        attr.vendor_part_id = self.adapter.row().vendor_part_id;
        attr.hw_ver = has.hw_ver;
        attr.max_qp = int(has.max_qps);
        attr.max_qp_wr = int(has.max_wr_depth);
        let mut flags = c::IBV_DEVICE_CURR_QP_STATE_MOD
            | c::IBV_DEVICE_PORT_ACTIVE_EVENT
            | c::IBV_DEVICE_SYS_IMAGE_GUID
            | c::IBV_DEVICE_MEM_WINDOW
            | c::IBV_DEVICE_MEM_WINDOW_TYPE_2B
            | c::IBV_DEVICE_MEM_MGT_EXTENSIONS;
        if self.adapter.kind() == DeviceKind::Roce {
            flags |= c::IBV_DEVICE_RC_RNR_NAK_GEN;
        }
        attr.device_cap_flags = flags & most.profile.device_cap_flags;
        attr.max_sge = i32::from(has.max_sge);
        attr.max_sge_rd = i32::from(most.sge_rd);
        attr.max_cq = int(has.max_cqs);
        attr.max_cqe = int(has.max_cq_entries);
        attr.max_mr = int(has.max_mrs);
        attr.max_pd = int(has.max_pds);
        attr.max_qp_rd_atom = i32::from(has.max_ird);
        attr.max_res_rd_atom = int(most.res_rd_atom);
        attr.max_qp_init_rd_atom = i32::from(has.max_ord);
        if most.profile.atomics {
            // Not `IBV_ATOMIC_GLOB`: in private memory, instructions of the program can access a
            // word in the middle of an atomic.
            attr.atomic_cap = c::IBV_ATOMIC_HCA;
        }
        attr.max_mw = int(has.max_windows);
        attr.max_srq = int(has.max_srqs);
        attr.max_srq_wr = int(most.srq_wr);
        attr.max_srq_sge = i32::from(most.profile.max_srq_sge);
        // Address handles exist only in the memory of the program.
        attr.max_ah = if self.gids().is_empty() { 0 } else { int(most.profile.max_ah) };
        attr.max_pkeys = 1;
        attr.local_ca_ack_delay = most.profile.local_ca_ack_delay;
        attr.phys_port_cnt = PORT;
        attr
    }

    /// Like [`attributes`](Self::attributes), with later additions (`ibv_query_device_ex(3)`).
    pub(crate) fn attributes_ex(&self) -> c::ibv_device_attr_ex {
        let mut attr: c::ibv_device_attr_ex = zeroed();
        attr.orig_attr = self.attributes();
        // The device has no flags other than those of `device_cap_flags`.
        attr.device_cap_flags_ex = u64::from(attr.orig_attr.device_cap_flags);
        attr.phys_port_cnt_ex = u32::from(PORT);
        attr
    }

    /// Returns the attributes of the port (`ibv_query_port(3)`).
    pub(crate) fn port(&self, port: u8) -> Result<c::ibv_port_attr, Errno> {
        check_port(port)?;
        let mut attr: c::ibv_port_attr = zeroed();
        let row = self.row();
        let is_down = row.port_down;
        attr.state = if is_down { c::IBV_PORT_DOWN } else { c::IBV_PORT_ACTIVE };
        let profile = &self.adapter.limits().profile;
        attr.max_mtu = mtu_code(profile.max_mtu);
        attr.active_mtu = self.mtu();
        attr.gid_tbl_len = int(self.gid_count());
        attr.max_msg_sz = profile.max_msg_sz;
        attr.pkey_tbl_len = 1;
        attr.max_vl_num = 1;
        attr.active_width = row.active_width;
        attr.active_speed = row.active_speed;
        attr.phys_state = if is_down { PHYS_STATE_DISABLED } else { PHYS_STATE_LINK_UP };
        attr.link_layer = c::IBV_LINK_LAYER_ETHERNET;
        if self.kind() == DeviceKind::Roce {
            attr.port_cap_flags = CM_SUPPORTED | IP_BASED_GIDS;
            attr.flags = GRH_REQUIRED;
        }
        Ok(attr)
    }

    /// Returns the current description of the device. If the daemon has removed the device, returns
    /// its first description.
    fn row(&self) -> DeviceRow {
        let tables = self.device.tables();
        let rows = tables.as_ref().map_or(&[][..], |tables| &tables.devices);
        let row = rows.iter().find(|row| self.adapter.is(row));
        row.unwrap_or_else(|| self.adapter.row()).clone()
    }

    /// Returns the active MTU: on Ethernet, the largest verbs MTU for which packets with RoCE v2
    /// headers fit into a frame, or that of the profile if it is lower.
    fn mtu(&self) -> c::ibv_mtu {
        let gids = self.gids();
        let bytes = gids.iter().filter(|row| !row.gid.is_zero()).map(GidRow::path_mtu).min();
        let of_profile = mtu_code(self.adapter.limits().profile.active_mtu);
        bytes.map_or(net::IWARP_MTU, mtu_code).min(of_profile)
    }

    /// Returns an entry of the GID table.
    pub(crate) fn gid_row(&self, port: u8, index: u32) -> Option<GidRow> {
        if port != PORT || index >= self.gid_count() || self.kind() == DeviceKind::Iwarp {
            return None;
        }
        let row = usize::try_from(index).ok().and_then(|index| self.gids().get(index).cloned());
        Some(row.unwrap_or_else(empty_gid))
    }

    /// Returns the GID table. It is empty for the iWARP device, and without a daemon.
    pub(crate) fn gids(&self) -> Arc<Gids> {
        let tables = self.device.tables();
        tables.map_or_else(|_| Arc::default(), |tables| self.adapter.gids(&tables))
    }

    /// Returns a GID of the table (`ibv_query_gid(3)`).
    pub(crate) fn gid(&self, port: u8, index: u32) -> Result<c::ibv_gid, Errno> {
        check_port(port)?;
        let of_iwarp = (self.kind() == DeviceKind::Iwarp && index == 0).then(|| self.device.gid());
        let of_roce = self.gid_row(port, index).map(|row| c::ibv_gid { raw: row.gid.0 });
        of_iwarp.or(of_roce).ok_or_else(|| {
            let count = self.gid_count();
            invalid!("GID index {index}: the table has {count} entries")
        })
    }

    /// Returns the number of entries in the GID table.
    pub(crate) fn gid_count(&self) -> u32 {
        match self.kind() {
            DeviceKind::Iwarp => 1,
            DeviceKind::Roce => {
                let shown = u32::try_from(self.gids().len()).unwrap_or(u32::MAX);
                shown.max(self.adapter.limits().profile.gid_tbl_len)
            }
        }
    }

    /// Returns a partition key of the table, in network byte order (`ibv_query_pkey(3)`).
    pub(crate) fn pkey(&self, port: u8, index: i32) -> Result<u16, Errno> {
        check_port(port)?;
        match index {
            0 => Ok(self.row().p_key.to_be()),
            _ => Err(invalid!("P_Key index {index}: the table has 1 entry")),
        }
    }
}

fn check_port(port: u8) -> Result<(), Errno> {
    match port {
        PORT => Ok(()),
        _ => Err(invalid!("port {port}: the device has only port {PORT}")),
    }
}

/// `IBV_PORT_CM_SUP`.
const CM_SUPPORTED: u32 = 1 << 16;
/// `IBV_PORT_IP_BASED_GIDS`.
const IP_BASED_GIDS: u32 = 1 << 26;
/// Physical states of a port (IBTA specification, volume 1, section 14.2.5.6).
const PHYS_STATE_DISABLED: u8 = 3;
const PHYS_STATE_LINK_UP: u8 = 5;
/// `IBV_QPF_GRH_REQUIRED`.
const GRH_REQUIRED: u8 = 1;

/// Returns the code of an MTU in bytes, rounded down.
pub(crate) fn mtu_code(bytes: u32) -> c::ibv_mtu {
    match bytes {
        4096.. => c::IBV_MTU_4096,
        2048.. => c::IBV_MTU_2048,
        1024.. => c::IBV_MTU_1024,
        512.. => c::IBV_MTU_512,
        _ => c::IBV_MTU_256,
    }
}

/// Converts a limit to `int`; saturates.
fn int(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}
