//! Texts for the numbers of the API, identical to those of libibverbs: scripts and test suites
//! compare them.

use std::ffi::CStr;

use libc::{c_char, c_uint};

use crate::c::ibv_node_type;

const WC_STATUS: [&CStr; 24] = [
    c"success",
    c"local length error",
    c"local QP operation error",
    c"local EE context operation error",
    c"local protection error",
    c"Work Request Flushed Error",
    c"memory management operation error",
    c"bad response error",
    c"local access error",
    c"remote invalid request error",
    c"remote access error",
    c"remote operation error",
    c"transport retry counter exceeded",
    c"RNR retry counter exceeded",
    c"local RDD violation error",
    c"remote invalid RD request",
    c"aborted error",
    c"invalid EE context number",
    c"invalid EE context state",
    c"fatal error",
    c"response timeout error",
    c"general error",
    c"TM error",
    c"TM software rendezvous",
];

const NODE_TYPES: [&CStr; 8] = [
    c"unknown",
    c"InfiniBand channel adapter",
    c"InfiniBand switch",
    c"InfiniBand router",
    c"iWARP NIC",
    c"usNIC",
    c"usNIC UDP",
    c"unspecified",
];

const PORT_STATES: [&CStr; 6] =
    [c"no state change (NOP)", c"down", c"init", c"armed", c"active", c"active defer"];

const EVENTS: [&CStr; 20] = [
    c"CQ error",
    c"local work queue catastrophic error",
    c"invalid request local work queue error",
    c"local access violation work queue error",
    c"communication established",
    c"send queue drained",
    c"path migrated",
    c"path migration request error",
    c"local catastrophic error",
    c"port active",
    c"port error",
    c"LID change",
    c"P_Key change",
    c"SM change",
    c"SRQ catastrophic error",
    c"SRQ limit reached",
    c"last WQE reached",
    c"client reregistration",
    c"GID table change",
    c"WQ fatal",
];

const CM_EVENTS: [&CStr; 16] = [
    c"RDMA_CM_EVENT_ADDR_RESOLVED",
    c"RDMA_CM_EVENT_ADDR_ERROR",
    c"RDMA_CM_EVENT_ROUTE_RESOLVED",
    c"RDMA_CM_EVENT_ROUTE_ERROR",
    c"RDMA_CM_EVENT_CONNECT_REQUEST",
    c"RDMA_CM_EVENT_CONNECT_RESPONSE",
    c"RDMA_CM_EVENT_CONNECT_ERROR",
    c"RDMA_CM_EVENT_UNREACHABLE",
    c"RDMA_CM_EVENT_REJECTED",
    c"RDMA_CM_EVENT_ESTABLISHED",
    c"RDMA_CM_EVENT_DISCONNECTED",
    c"RDMA_CM_EVENT_DEVICE_REMOVAL",
    c"RDMA_CM_EVENT_MULTICAST_JOIN",
    c"RDMA_CM_EVENT_MULTICAST_ERROR",
    c"RDMA_CM_EVENT_ADDR_CHANGE",
    c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
];

/// ibv_wc_status_str(3).
pub(crate) extern "C" fn ibv_wc_status_str(status: c_uint) -> *const c_char {
    named(&WC_STATUS, status)
}

/// ibv_port_state_str(3).
pub(crate) extern "C" fn ibv_port_state_str(state: c_uint) -> *const c_char {
    named(&PORT_STATES, state)
}

/// ibv_event_type_str(3).
pub(crate) extern "C" fn ibv_event_type_str(event: c_uint) -> *const c_char {
    named(&EVENTS, event)
}

/// ibv_node_type_str(3).
pub(crate) extern "C" fn ibv_node_type_str(node_type: ibv_node_type) -> *const c_char {
    named(&NODE_TYPES, node_type.cast_unsigned())
}

/// rdma_event_str(3).
pub(crate) extern "C" fn rdma_event_str(event: c_uint) -> *const c_char {
    cm_event(event).as_ptr()
}

/// Returns the name of an event of an id.
pub(crate) fn cm_event(event: c_uint) -> &'static CStr {
    CM_EVENTS.get(event as usize).copied().unwrap_or(c"UNKNOWN EVENT")
}

fn named(names: &[&'static CStr], number: c_uint) -> *const c_char {
    names.get(number as usize).copied().unwrap_or(c"unknown").as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::c;

    /// Reads a returned string as a program does.
    fn read(text: *const c_char) -> &'static str {
        // SAFETY: all are static strings that end in a zero byte.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap_or_default()
    }

    #[test]
    fn numbers_have_their_names() {
        assert_eq!(read(ibv_wc_status_str(0)), "success");
        assert_eq!(read(ibv_wc_status_str(13)), "RNR retry counter exceeded");
        assert_eq!(read(ibv_port_state_str(c::IBV_PORT_ACTIVE)), "active");
        assert_eq!(read(ibv_event_type_str(c::IBV_EVENT_COMM_EST)), "communication established");
        assert_eq!(read(rdma_event_str(c::RDMA_CM_EVENT_REJECTED)), "RDMA_CM_EVENT_REJECTED");
        assert_eq!(read(ibv_node_type_str(c::IBV_NODE_RNIC)), "iWARP NIC");
        assert_eq!(read(ibv_node_type_str(c::IBV_NODE_UNKNOWN)), "unknown");
        assert_eq!(read(ibv_wc_status_str(1000)), "unknown");
        assert_eq!(read(rdma_event_str(1000)), "UNKNOWN EVENT");
    }
}
