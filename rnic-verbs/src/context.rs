//! Open devices (`ibv_open_device(3)`), and what they say about themselves.

use std::os::fd::RawFd;
use std::sync::Arc;

use rnic_client::GidRow;

use crate::async_events::AsyncEvents;
use crate::c;
use crate::cq::VECTORS;
use crate::device::{Device, DeviceKind, copy_name};
use crate::errno::Errno;
use crate::event_queue::EventQueue;
use crate::net;
use crate::object::zeroed;

/// A context. All contexts of a process are of one session.
pub(crate) struct ContextBody {
    device: Arc<Device>,
    /// Which of the two devices it is of.
    kind: DeviceKind,
    async_events: Arc<AsyncEvents>,
}

/// Port of the device: it has one.
pub(crate) const PORT: u8 = 1;
/// Largest path MTU that a QP may name (`max_mtu`): the stream below cuts segments of its own.
pub(crate) const MAX_MTU: c::ibv_mtu = c::IBV_MTU_4096;

impl ContextBody {
    pub(crate) fn open(device: Arc<Device>, kind: DeviceKind) -> Result<ContextBody, Errno> {
        let async_events = Arc::new(EventQueue::new()?);
        if kind == DeviceKind::Roce {
            device.gids.rows(&device.context)?;
        }
        device.opened(&async_events);
        Ok(ContextBody { device, kind, async_events })
    }

    /// Which of the two devices it is of.
    pub(crate) fn kind(&self) -> DeviceKind {
        self.kind
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(crate) fn async_events(&self) -> &Arc<AsyncEvents> {
        &self.async_events
    }

    pub(crate) fn async_fd(&self) -> RawFd {
        self.async_events.fd()
    }

    /// Identity and limits (`ibv_query_device(3)`).
    pub(crate) fn attributes(&self) -> c::ibv_device_attr {
        let has = &self.device.attributes;
        let mut says: c::ibv_device_attr = zeroed();
        copy_name(&mut says.fw_ver, &has.version);
        says.node_guid = self.device.guid(self.kind);
        says.sys_image_guid = self.device.guid(DeviceKind::Iwarp);
        says.max_mr_size = u64::MAX;
        // Any size from a page up.
        says.page_size_cap = !(rustix::param::page_size() as u64 - 1);
        (says.vendor_id, says.vendor_part_id) = match self.kind {
            DeviceKind::Iwarp => (has.vendor_id, has.vendor_part_id),
            DeviceKind::Roce => (has.wired_vendor_id, has.wired_part_id),
        };
        says.hw_ver = has.hw_ver;
        says.max_qp = int(has.max_qps);
        says.max_qp_wr = int(has.max_wr_depth);
        says.device_cap_flags = c::IBV_DEVICE_CURR_QP_STATE_MOD
            | c::IBV_DEVICE_MEM_WINDOW
            | c::IBV_DEVICE_MEM_WINDOW_TYPE_2B
            | c::IBV_DEVICE_MEM_MGT_EXTENSIONS;
        says.max_sge = i32::from(has.max_sge);
        says.max_sge_rd = match self.kind {
            // RFC 5040 section 5.2: one sink for each Read.
            DeviceKind::Iwarp => 1,
            DeviceKind::Roce => says.max_sge,
        };
        says.max_cq = int(has.max_cqs);
        says.max_cqe = int(has.max_cq_entries);
        says.max_mr = int(has.max_mrs);
        says.max_pd = int(has.max_pds);
        says.max_qp_rd_atom = i32::from(has.max_ird);
        says.max_res_rd_atom = i32::from(has.max_ird).saturating_mul(int(has.max_qps));
        says.max_qp_init_rd_atom = i32::from(has.max_ord);
        // In memory that is not shared the program's own instructions may come in between.
        says.atomic_cap = c::IBV_ATOMIC_HCA;
        says.max_mw = int(has.max_windows);
        says.max_srq = int(has.max_srqs);
        says.max_srq_wr = int(has.max_wr_depth);
        says.max_srq_sge = i32::from(has.max_sge);
        // The library's own, in the program's own memory.
        says.max_ah = if self.gids().is_empty() { 0 } else { i32::from(u16::MAX) };
        says.max_pkeys = 1;
        says.phys_port_cnt = PORT;
        says
    }

    /// As [`attributes`](Self::attributes), with what came later (`ibv_query_device_ex(3)`).
    pub(crate) fn attributes_ex(&self) -> c::ibv_device_attr_ex {
        let mut says: c::ibv_device_attr_ex = zeroed();
        says.orig_attr = self.attributes();
        // Completions say when they were written, in nanoseconds.
        says.device_cap_flags_ex = u64::from(says.orig_attr.device_cap_flags);
        says.phys_port_cnt_ex = u32::from(PORT);
        says
    }

    /// The port (`ibv_query_port(3)`).
    pub(crate) fn port(&self, port: u8) -> Result<c::ibv_port_attr, Errno> {
        check_port(port)?;
        let mut says: c::ibv_port_attr = zeroed();
        says.state = c::IBV_PORT_ACTIVE;
        says.max_mtu = MAX_MTU;
        says.active_mtu = self.mtu();
        says.gid_tbl_len = i32::try_from(self.gids().len().max(1)).unwrap_or(1);
        says.max_msg_sz = 1 << 30;
        says.pkey_tbl_len = 1;
        says.max_vl_num = 1;
        // 4x of 25 Gb/s: what a program makes of it is a number on a screen.
        says.active_width = 2;
        says.active_speed = 32;
        says.phys_state = 5;
        says.link_layer = c::IBV_LINK_LAYER_ETHERNET;
        if self.kind == DeviceKind::Roce {
            says.port_cap_flags = CM_SUPPORTED | IP_BASED_GIDS;
            says.flags = GRH_REQUIRED;
        }
        Ok(says)
    }

    /// The size of packets as verbs number it: on Ethernet what fits a frame with the headers of
    /// RoCE v2.
    fn mtu(&self) -> c::ibv_mtu {
        let gids = self.gids();
        let bytes = gids.iter().filter(|row| !row.gid.is_zero()).map(GidRow::path_mtu).min();
        bytes.map_or(net::verbs_mtu(), |bytes| match bytes {
            4096.. => c::IBV_MTU_4096,
            2048.. => c::IBV_MTU_2048,
            1024.. => c::IBV_MTU_1024,
            512.. => c::IBV_MTU_512,
            _ => c::IBV_MTU_256,
        })
    }

    /// An entry of the table of GIDs, if the device has one.
    pub(crate) fn gid_row(&self, port: u8, index: u32) -> Option<GidRow> {
        self.gids().get(usize::try_from(index).ok()?).filter(|_| port == PORT).cloned()
    }

    /// The GID table: that of the RoCE device; the other one has none. Empty without a daemon.
    pub(crate) fn gids(&self) -> Arc<[GidRow]> {
        match self.kind {
            DeviceKind::Iwarp => Arc::new([]),
            DeviceKind::Roce => {
                self.device.gids.rows(&self.device.context).unwrap_or_else(|_| Arc::new([]))
            }
        }
    }

    /// A GID of the table (`ibv_query_gid(3)`).
    pub(crate) fn gid(&self, port: u8, index: u32) -> Result<c::ibv_gid, Errno> {
        check_port(port)?;
        let of_iwarp = (self.kind == DeviceKind::Iwarp && index == 0).then(|| self.device.gid());
        let of_roce = self.gid_row(port, index).map(|row| c::ibv_gid { raw: row.gid.0 });
        of_iwarp.or(of_roce).ok_or_else(|| {
            let count = self.gid_count();
            Errno::invalid(format_args!("GID index {index}: the table has {count} entries"))
        })
    }

    /// Entries of the GID table.
    pub(crate) fn gid_count(&self) -> u32 {
        match self.kind {
            DeviceKind::Iwarp => 1,
            DeviceKind::Roce => u32::try_from(self.gids().len()).unwrap_or(u32::MAX),
        }
    }

    /// A partition key of the table, in network byte order (`ibv_query_pkey(3)`).
    pub(crate) fn pkey(&self, port: u8, index: i32) -> Result<u16, Errno> {
        check_port(port)?;
        match index {
            0 => Ok(u16::MAX),
            _ => Err(Errno::invalid(format_args!("P_Key index {index}: the table has 1 entry"))),
        }
    }

    pub(crate) fn vectors(&self) -> i32 {
        int(VECTORS)
    }
}

fn check_port(port: u8) -> Result<(), Errno> {
    match port {
        PORT => Ok(()),
        _ => Err(Errno::invalid(format_args!("port {port}: the device has port {PORT} only"))),
    }
}

/// `IBV_PORT_CM_SUP`.
const CM_SUPPORTED: u32 = 1 << 16;
/// `IBV_PORT_IP_BASED_GIDS`.
const IP_BASED_GIDS: u32 = 1 << 26;
/// `IBV_QPF_GRH_REQUIRED`.
const GRH_REQUIRED: u8 = 1;

/// A limit as C has it: a number that does not fit is as good as none.
fn int(n: u32) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}
