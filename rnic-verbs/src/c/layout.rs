//! Sizes and offsets that programs were compiled with. The compiler checks each line, and the tests
//! below compare them with the installed C headers.

use super::*;

/// Checks the size of each structure and the offset of each field. A field with another
/// name in C is written `rust = c`.
macro_rules! layout {
    ($($name:ident $size:tt {
        $($($field:ident).+ $(= $($c:ident).+)? : $offset:expr),* $(,)?
    })*) => {
        $(
            const _: () = assert!(size_of::<$name>() == $size);
            $(const _: () = assert!(std::mem::offset_of!($name, $($field).+) == $offset);)*
        )*
        /// The same data for the tests: name and size of each structure, and its fields.
        #[cfg(test)]
        const LAYOUT: &[(&str, usize, &[(&str, usize)])] = &[
            $((stringify!($name), $size, &[$((
                layout!(@c $($field).+ $(= $($c).+)?), $offset,
            )),*])),*
        ];
    };
    (@c $($field:ident).+ = $($c:ident).+) => { stringify!($($c).+) };
    (@c $($field:ident).+) => { stringify!($($field).+) };
}

/// Number of bytes by which `pthread_mutex_t` is larger than on x86-64: 8 on AArch64.
const M: usize = size_of::<libc::pthread_mutex_t>() - 40;

layout! {
    ibv_device 664 {
        _ops: 0, node_type: 16, transport_type: 20, name: 24, dev_name: 88, dev_path: 152,
        ibdev_path: 408,
    }
    ibv_context_ops 256 {
        alloc_mw: 56, bind_mw: 64, dealloc_mw: 72, poll_cq: 88, req_notify_cq: 96,
        post_srq_recv: 160, post_send: 200, post_recv: 208,
    }
    ibv_context (328 + M) {
        device: 0, ops: 8, cmd_fd: 264, async_fd: 268, num_comp_vectors: 272, mutex: 280,
        abi_compat: 320 + M,
    }
    verbs_context (648 + M) {
        query_port: 0, advise_mr: 8, alloc_null_mr: 16, read_counters: 24, reg_dm_mr: 56,
        alloc_dm: 64, free_dm: 72, modify_flow_action_esp: 80, modify_qp_rate_limit: 104,
        alloc_parent_domain: 112, dealloc_td: 120, alloc_td: 128, modify_cq: 136,
        post_srq_ops: 144, destroy_rwq_ind_table: 152, create_wq: 184, query_rt_values: 192,
        create_cq_ex: 200, priv_ = priv: 208, query_device_ex: 216, ibv_destroy_flow: 224,
        ibv_create_flow: 240, open_qp: 256, create_qp_ex: 264, get_srq_num: 272,
        create_srq_ex: 280, open_xrcd: 288, close_xrcd: 296, sz: 312, context: 320,
    }
    ibv_pd 16 { context: 0, handle: 8 }
    ibv_mr 48 { context: 0, pd: 8, addr: 16, length: 24, handle: 32, lkey: 36, rkey: 40 }
    ibv_mw 32 { context: 0, pd: 8, rkey: 16, handle: 20, type_ = type: 24 }
    ibv_mw_bind_info 32 { mr: 0, addr: 8, length: 16, mw_access_flags: 24 }
    ibv_mw_bind 48 {
        wr_id: 0, send_flags: 8, bind_info.mr: 16, bind_info.addr: 24, bind_info.length: 32,
        bind_info.mw_access_flags: 40,
    }
    ibv_comp_channel 16 { context: 0, fd: 8, refcnt: 12 }
    ibv_cq (128 + M) {
        context: 0, channel: 8, cq_context: 16, handle: 24, cqe: 28, mutex: 32, cond: 72 + M,
        comp_events_completed: 120 + M, async_events_completed: 124 + M,
    }
    ibv_cq_ex (288 + M) {
        cq_base.context = context: 0, comp_mask: 128 + M, status: 132 + M, wr_id: 136 + M,
        start_poll: 144 + M, next_poll: 152 + M, end_poll: 160 + M, read_opcode: 168 + M,
        read_vendor_err: 176 + M, read_byte_len: 184 + M, read_imm_data: 192 + M,
        read_qp_num: 200 + M, read_src_qp: 208 + M, read_wc_flags: 216 + M, read_slid: 224 + M,
        read_sl: 232 + M, read_dlid_path_bits: 240 + M, read_completion_ts: 248 + M,
        read_cvlan: 256 + M, read_flow_tag: 264 + M, read_tm_info: 272 + M,
        read_completion_wallclock_ns: 280 + M,
    }
    ibv_poll_cq_attr 4 { comp_mask: 0 }
    ibv_cq_init_attr_ex 56 {
        cqe: 0, cq_context: 8, channel: 16, comp_vector: 24, wc_flags: 32, comp_mask: 40,
        flags: 44, parent_domain: 48,
    }
    ibv_wc 48 {
        wr_id: 0, status: 8, opcode: 12, vendor_err: 16, byte_len: 20, imm_data: 24, qp_num: 28,
        src_qp: 32, wc_flags: 36, pkey_index: 40, slid: 42, sl: 44, dlid_path_bits: 45,
    }
    ibv_srq (128 + M) {
        context: 0, srq_context: 8, pd: 16, handle: 24, mutex: 32, cond: 72 + M,
        events_completed: 120 + M,
    }
    ibv_srq_attr 12 { max_wr: 0, max_sge: 4, srq_limit: 8 }
    ibv_srq_init_attr 24 {
        srq_context: 0, attr.max_wr: 8, attr.max_sge: 12, attr.srq_limit: 16,
    }
    ibv_srq_init_attr_ex 64 {
        srq_context: 0, attr: 8, comp_mask: 20, srq_type: 24, pd: 32, xrcd: 40, cq: 48,
        tm_cap: 56,
    }
    ibv_qp (160 + M) {
        context: 0, qp_context: 8, pd: 16, send_cq: 24, recv_cq: 32, srq: 40, handle: 48,
        qp_num: 52, state: 56, qp_type: 60, mutex: 64, cond: 104 + M, events_completed: 152 + M,
    }
    ibv_qp_ex (352 + M) {
        qp_base: 0, comp_mask: 160 + M, wr_id: 168 + M, wr_flags: 176 + M,
        wr_atomic_cmp_swp: 184 + M, wr_atomic_fetch_add: 192 + M, wr_bind_mw: 200 + M,
        wr_local_inv: 208 + M, wr_rdma_read: 216 + M, wr_rdma_write: 224 + M,
        wr_rdma_write_imm: 232 + M, wr_send: 240 + M, wr_send_imm: 248 + M,
        wr_send_inv: 256 + M, wr_send_tso: 264 + M, wr_set_ud_addr: 272 + M,
        wr_set_xrc_srqn: 280 + M, wr_set_inline_data: 288 + M, wr_set_inline_data_list: 296 + M,
        wr_set_sge: 304 + M, wr_set_sge_list: 312 + M, wr_start: 320 + M, wr_complete: 328 + M,
        wr_abort: 336 + M, wr_atomic_write: 344 + M,
    }
    ibv_qp_cap 20 {
        max_send_wr: 0, max_recv_wr: 4, max_send_sge: 8, max_recv_sge: 12, max_inline_data: 16,
    }
    ibv_qp_init_attr 64 {
        qp_context: 0, send_cq: 8, recv_cq: 16, srq: 24, cap: 32, qp_type: 52, sq_sig_all: 56,
    }
    ibv_qp_init_attr_ex 136 {
        qp_context: 0, send_cq: 8, recv_cq: 16, srq: 24, cap: 32, qp_type: 52, sq_sig_all: 56,
        comp_mask: 60, pd: 64, xrcd: 72, create_flags: 80, max_tso_header: 84, rwq_ind_tbl: 88,
        rx_hash_conf: 96, source_qpn: 120, send_ops_flags: 128,
    }
    ibv_qp_attr 144 {
        qp_state: 0, cur_qp_state: 4, path_mtu: 8, path_mig_state: 12, qkey: 16, rq_psn: 20,
        sq_psn: 24, dest_qp_num: 28, qp_access_flags: 32, cap: 36, ah_attr: 56, alt_ah_attr: 88,
        pkey_index: 120, alt_pkey_index: 122, en_sqd_async_notify: 124, sq_draining: 125,
        max_rd_atomic: 126, max_dest_rd_atomic: 127, min_rnr_timer: 128, port_num: 129,
        timeout: 130, retry_cnt: 131, rnr_retry: 132, alt_port_num: 133, alt_timeout: 134,
        rate_limit: 136,
    }
    ibv_sge 16 { addr: 0, length: 8, lkey: 12 }
    ibv_data_buf 16 { addr: 0, length: 8 }
    ibv_recv_wr 32 { wr_id: 0, next: 8, sg_list: 16, num_sge: 24 }
    ibv_send_wr 128 {
        wr_id: 0, next: 8, sg_list: 16, num_sge: 24, opcode: 28, send_flags: 32, imm_data: 36,
        wr.rdma.remote_addr: 40, wr.rdma.rkey: 48, wr.atomic.remote_addr: 40,
        wr.atomic.compare_add: 48, wr.atomic.swap: 56, wr.atomic.rkey: 64, wr.ud.ah: 40,
        wr.ud.remote_qpn: 48, wr.ud.remote_qkey: 52,
        qp_type.xrc_remote_srqn = qp_type.xrc.remote_srqn: 72, bind_mw.mw: 80, bind_mw.rkey: 88,
        bind_mw.bind_info: 96,
    }
    ibv_device_attr 232 {
        fw_ver: 0, node_guid: 64, sys_image_guid: 72, max_mr_size: 80, page_size_cap: 88,
        vendor_id: 96, vendor_part_id: 100, hw_ver: 104, max_qp: 108, max_qp_wr: 112,
        device_cap_flags: 116, max_sge: 120, max_sge_rd: 124, max_cq: 128, max_cqe: 132,
        max_mr: 136, max_pd: 140, max_qp_rd_atom: 144, max_ee_rd_atom: 148,
        max_res_rd_atom: 152, max_qp_init_rd_atom: 156, max_ee_init_rd_atom: 160,
        atomic_cap: 164, max_ee: 168, max_rdd: 172, max_mw: 176, max_raw_ipv6_qp: 180,
        max_raw_ethy_qp: 184, max_mcast_grp: 188, max_mcast_qp_attach: 192,
        max_total_mcast_qp_attach: 196, max_ah: 200, max_fmr: 204, max_map_per_fmr: 208,
        max_srq: 212, max_srq_wr: 216, max_srq_sge: 220, max_pkeys: 224,
        local_ca_ack_delay: 226, phys_port_cnt: 227,
    }
    ibv_device_attr_ex 400 {
        orig_attr: 0, comp_mask: 232, odp_caps: 240, completion_timestamp_mask: 264,
        hca_core_clock: 272, device_cap_flags_ex: 280, tso_caps: 288, rss_caps: 296,
        max_wq_type_rq: 328, packet_pacing_caps: 332, raw_packet_caps: 344, tm_caps: 348,
        cq_mod_caps: 368, max_dm_size: 376, pci_atomic_caps: 384, xrc_odp_caps: 392,
        phys_port_cnt_ex: 396,
    }
    ibv_port_attr 52 {
        state: 0, max_mtu: 4, active_mtu: 8, gid_tbl_len: 12, port_cap_flags: 16,
        max_msg_sz: 20, bad_pkey_cntr: 24, qkey_viol_cntr: 28, pkey_tbl_len: 32, lid: 34,
        sm_lid: 36, lmc: 38, max_vl_num: 39, sm_sl: 40, subnet_timeout: 41, init_type_reply: 42,
        active_width: 43, active_speed: 44, phys_state: 45, link_layer: 46, flags: 47,
        port_cap_flags2: 48,
    }
    ibv_async_event 16 {
        element.cq: 0, element.qp: 0, element.srq: 0, element.port_num: 0, event_type: 8,
    }
    ibv_values_ex 24 { comp_mask: 0, raw_clock: 8 }
    ibv_ece 12 { vendor_id: 0, options: 4, comp_mask: 8 }
    ibv_gid_entry 32 { gid: 0, gid_index: 16, port_num: 20, gid_type: 24, ndev_ifindex: 28 }
    ibv_global_route 24 {
        dgid: 0, flow_label: 16, sgid_index: 20, hop_limit: 21, traffic_class: 22,
    }
    ibv_ah_attr 32 {
        grh: 0, dlid: 24, sl: 26, src_path_bits: 27, static_rate: 28, is_global: 29,
        port_num: 30,
    }
    ibv_ah 24 { context: 0, pd: 8, handle: 16 }
    ibv_sa_path_rec 64 {
        dgid: 0, sgid: 16, dlid: 32, slid: 34, raw_traffic: 36, flow_label: 40, hop_limit: 44,
        traffic_class: 45, reversible: 48, numb_path: 52, pkey: 54, sl: 56, mtu_selector: 57,
        mtu: 58, rate_selector: 59, rate: 60, packet_life_time_selector: 61,
        packet_life_time: 62, preference: 63,
    }
    rdma_event_channel 4 { fd: 0 }
    rdma_cm_id 416 {
        verbs: 0, channel: 8, context: 16, qp: 24, route.addr.src = route.addr.src_addr: 32,
        route.addr.dst = route.addr.dst_addr: 160,
        route.addr.addr.sgid = route.addr.addr.ibaddr.sgid: 288,
        route.addr.addr.dgid = route.addr.addr.ibaddr.dgid: 304,
        route.addr.addr.pkey = route.addr.addr.ibaddr.pkey: 320, route.path_rec: 328,
        route.num_paths: 336, ps: 344, port_num: 348, event: 352, send_cq_channel: 360,
        send_cq: 368, recv_cq_channel: 376, recv_cq: 384, srq: 392, pd: 400, qp_type: 408,
    }
    sockaddr_ib 48 {
        sib_family: 0, sib_pkey: 2, sib_flowinfo: 4, sib_addr: 8, sib_sid: 24, sib_sid_mask: 32,
        sib_scope_id: 40,
    }
    rdma_cm_event 80 {
        id: 0, listen_id: 8, event: 16, status: 20, param.conn: 24, param.ud: 24,
    }
    rdma_conn_param 24 {
        private_data: 0, private_data_len: 8, responder_resources: 9, initiator_depth: 10,
        flow_control: 11, retry_count: 12, rnr_retry_count: 13, srq: 14, qp_num: 16,
    }
    rdma_ud_param 56 {
        private_data: 0, private_data_len: 8, ah_attr: 16, qp_num: 48, qkey: 52,
    }
    rdma_addrinfo 96 {
        ai_flags: 0, ai_family: 4, ai_qp_type: 8, ai_port_space: 12, ai_src_len: 16,
        ai_dst_len: 20, ai_src_addr: 24, ai_dst_addr: 32, ai_src_canonname: 40,
        ai_dst_canonname: 48, ai_route_len: 56, ai_route: 64, ai_connect_len: 72,
        ai_connect: 80, ai_next: 88,
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::LAYOUT;

    /// Returns a program that the C compiler refuses if a size or an offset of its headers differs.
    fn program() -> String {
        let mut c = String::from(
            "#include <stddef.h>\n#include <rdma/rdma_cma.h>\n#include <infiniband/ib.h>\n",
        );
        for (name, size, fields) in LAYOUT {
            writeln!(c, "_Static_assert(sizeof(struct {name}) == {size}, \"{name}\");").unwrap();
            for (field, offset) in *fields {
                let field = field.replace(' ', "");
                let ours = format!("offsetof(struct {name}, {field}) == {offset}");
                writeln!(c, "_Static_assert({ours}, \"{name}.{field}\");").unwrap();
            }
        }
        c
    }

    /// The compiler is `CC`, for a program of another architecture.
    #[test]
    fn layout_matches_the_c_headers() {
        if !Path::new("/usr/include/rdma/rdma_cma.h").exists() {
            let why = "there is no <rdma/rdma_cma.h> (Debian package librdmacm-dev)";
            assert!(std::env::var_os("RNIC_TEST_ALL").is_none(), "RNIC_TEST_ALL is set, but {why}");
            eprintln!("left out: {why}");
            return;
        }
        let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
        let mut compiler = Command::new(compiler)
            .args(["-fsyntax-only", "-idirafter", "/usr/include", "-x", "c", "-"])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        compiler.stdin.take().unwrap().write_all(program().as_bytes()).unwrap();
        let checked = compiler.wait_with_output().unwrap();
        let errors = String::from_utf8_lossy(&checked.stderr);
        assert!(checked.status.success(), "the C compiler: {errors}");
    }
}
