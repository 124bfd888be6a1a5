//! Encoded bytes of every control message and event. A released encoding never changes.
//!
//! Each list holds one value per variant, in order. A new variant is appended to its enum and to
//! its list. An edit of an existing line means that older clients would misread the daemon.

use std::net::{SocketAddr, SocketAddrV6};

use serde::Serialize;
use serde::de::value::U32Deserializer;
use serde::de::{DeserializeOwned, IntoDeserializer};

use super::control::*;
use super::queue::QueueShape;
use crate::roce::PortSpace;
use crate::types::*;

/// Compares each value with its bytes in hexadecimal. Checks that the list covers all variants of
/// `E` in order. The byte at offset `skip` of an encoding is the variant.
fn check<E: DeserializeOwned>(skip: usize, golden: &[(impl Serialize + std::fmt::Debug, &str)]) {
    for (n, (value, bytes)) in golden.iter().enumerate() {
        let encoded = postcard::to_stdvec(value).unwrap();
        let hex: String = encoded.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, *bytes, "{value:?}");
        assert_eq!(usize::from(encoded[skip]), n, "{value:?} is out of order");
    }
    assert_eq!(golden.len(), variants::<E>(), "one line per variant");
}

/// Returns the number of variants of an enumeration, from serde's message about a number that no
/// variant has: "invalid value ..., expected variant index 0 <= i < 45".
fn variants<E: DeserializeOwned>() -> usize {
    let number: U32Deserializer<serde::de::value::Error> = u32::MAX.into_deserializer();
    let message = E::deserialize(number).err().unwrap().to_string();
    message.rsplit(' ').next().unwrap().parse().unwrap()
}

fn v4() -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 7], 7471))
}

fn v6() -> SocketAddr {
    let ip = [0x2001, 0xDB8, 0, 0, 0, 0, 0, 1].into();
    SocketAddrV6::new(ip, 4791, 0, 7).into()
}

fn pair() -> AddressPair {
    AddressPair { local: v4(), peer: v6() }
}

fn profile() -> Profile {
    Profile {
        name: "p".into(),
        kind: DeviceKind::Roce,
        fw_ver: "1.2".into(),
        max_mr_size: 18,
        page_size_cap: 19,
        device_cap_flags: 20,
        atomics: true,
        max_sge_rd: 21,
        max_srq_sge: 22,
        max_res_rd_atom: 23,
        max_ah: 24,
        max_ah_errno: 12,
        local_ca_ack_delay: 25,
        max_mtu: 4096,
        active_mtu: 1024,
        max_msg_sz: 26,
        gid_tbl_len: 27,
        gid_v1: true,
        active_width: 28,
        active_speed: 29,
        sends_overrun_cqs: true,
    }
}

fn location() -> QueueLocation {
    QueueLocation { arena: 1, offset: 4096, shape: QueueShape { capacity: 16, stride: 128 } }
}

fn srq_row() -> SrqRow {
    SrqRow {
        srq: SrqId(1),
        session: SessionId(2),
        pd: PdId(3),
        capacity: 512,
        posted: 5,
        taken: 6,
        limit: 7,
        qps: 8,
        waiting: 9,
        unfair: 10,
    }
}

fn why() -> Diagnosis {
    Diagnosis {
        id: 1,
        time_ms: 2,
        session: SessionId(3),
        what: DiagnosisKind::Completion { wr_id: 4, status: CompletionStatus::RemoteAccess },
        rule: "r".into(),
        text: "t".into(),
        qp: Some(QpId(5)),
        pd: Some(PdId(6)),
        stag: Some(Stag(7)),
        offset: Some(8),
        length: Some(9),
        addresses: Some(pair()),
    }
}

#[test]
fn requests() {
    let request = |body| Request { id: 300, body };
    let qp = QpId(300);
    let region = MrRequest {
        pd: PdId(7),
        source: MrSource::Shared { buffer: SharedBufferId(5), offset: 4096 },
        length: 8192,
        iova: 1 << 40,
        access: Access::LOCAL_WRITE | Access::REMOTE_READ,
        scope: Scope::Qp(qp),
    };
    let golden = [
        (request(RequestBody::QueryDevice), "ac0200"),
        (request(RequestBody::OpenPd { name: Some("shared".into()) }), "ac02010106736861726564"),
        (request(RequestBody::ClosePd { pd: PdId(7) }), "ac020207"),
        (request(RequestBody::AddSharedBuffer { length: 1 << 20 }), "ac0203808040"),
        (request(RequestBody::RemoveSharedBuffer { buffer: SharedBufferId(5) }), "ac020405"),
        (request(RequestBody::RegMr(region)), "ac0205070005802080408080808080200501ac02"),
        (request(RequestBody::DeregMr { mr: MrId(9) }), "ac020609"),
        (request(RequestBody::CreateChannel), "ac0207"),
        (request(RequestBody::DestroyChannel { channel: ChannelId(4) }), "ac020804"),
        (
            request(RequestBody::CreateCq {
                entries: 1000,
                channel: Some(ChannelId(4)),
                context: u64::MAX,
            }),
            "ac0209e8070104ffffffffffffffffff01",
        ),
        (request(RequestBody::DestroyCq { cq: CqId(3) }), "ac020a03"),
        (
            request(RequestBody::CreateQp(QpRequest {
                pd: PdId(7),
                send_cq: CqId(3),
                recv_cq: CqId(2),
                srq: None,
                sq_depth: 128,
                rq_depth: 64,
                max_send_sge: 4,
                max_recv_sge: 3,
                max_inline: 200,
                signal_all: true,
                rnr_policy: RnrPolicy::Wait { timeout_ms: 5 },
                context: 17,
                kind: QpType::Rc,
                device: "rxe0".into(),
            })),
            "ac020b070302008001400403c80101010511010472786530",
        ),
        (request(RequestBody::QpToError { qp }), "ac020cac02"),
        (request(RequestBody::DestroyQp { qp }), "ac020dac02"),
        (request(RequestBody::QueryQp { qp }), "ac020eac02"),
        (
            request(RequestBody::Bind { address: v6(), context: 6, v6_only: true }),
            "ac020f0120010db8000000000000000000000001b725070601",
        ),
        (request(RequestBody::Listen { listener: ListenerId(8), backlog: 16 }), "ac02100810"),
        (request(RequestBody::CloseListener { listener: ListenerId(8) }), "ac021108"),
        (
            request(RequestBody::Accept {
                request: RequestId(11),
                qp,
                ird: Some(16),
                ord: None,
                private_data: vec![1, 2, 3],
            }),
            "ac02120bac0201100003010203",
        ),
        (
            request(RequestBody::Reject { request: RequestId(11), private_data: vec![] }),
            "ac02130b00",
        ),
        (
            request(RequestBody::Connect {
                qp,
                peer: v4(),
                local: Some(v6()),
                ird: None,
                ord: Some(8),
                private_data: vec![0xFF],
            }),
            "ac0214ac0200c0000207af3a010120010db8000000000000000000000001b7250700010801ff",
        ),
        (request(RequestBody::Disconnect { qp, mode: DisconnectMode::Abort }), "ac0215ac0202"),
        (
            request(RequestBody::SetContext { object: ObjectRef::Cq(CqId(3)), context: 5 }),
            "ac0216010305",
        ),
        (request(RequestBody::Status), "ac0217"),
        (request(RequestBody::List { what: ListKind::Mrs, from: 32 }), "ac02180320"),
        (request(RequestBody::AllocWindow { pd: PdId(7), kind: WindowKind::Type2 }), "ac02190701"),
        (request(RequestBody::DeallocWindow { window: MwId(6) }), "ac021a06"),
        (
            request(RequestBody::CreateSrq(SrqRequest {
                pd: PdId(7),
                depth: 300,
                max_sge: 2,
                limit: 4,
                context: 5,
            })),
            "ac021b07ac02020405",
        ),
        (request(RequestBody::ArmSrq { srq: SrqId(3), limit: 300 }), "ac021c03ac02"),
        (request(RequestBody::QuerySrq { srq: SrqId(3) }), "ac021d03"),
        (request(RequestBody::DestroySrq { srq: SrqId(3) }), "ac021e03"),
        (request(RequestBody::AttachMemory), "ac021f"),
        (
            request(RequestBody::ConnectOver {
                qp,
                ird: Some(1),
                ord: None,
                private_data: vec![7],
            }),
            "ac0220ac020101000107",
        ),
        (request(RequestBody::ServeOver { context: 9 }), "ac022109"),
        (request(RequestBody::AdminDisconnect { qp }), "ac0222ac02"),
        (request(RequestBody::Drain { on: true }), "ac022301"),
        (request(RequestBody::Diagnosis { id: 1 << 40 }), "ac0224808080808020"),
        (request(RequestBody::ReserveSharedBuffer { length: 1 << 20 }), "ac0225808040"),
        (request(RequestBody::FillSharedBuffer { buffer: SharedBufferId(5) }), "ac022605"),
        (request(RequestBody::ResizeCq { cq: CqId(3), entries: 1000 }), "ac022703e807"),
        (
            request(RequestBody::ModifyQp {
                qp,
                change: QpChange::ReadyToReceive(Wiring {
                    local: Gid([1; 16]),
                    remote: Gid([2; 16]),
                    remote_qp: QpId(3),
                    rq_psn: 300,
                    path_mtu: 1024,
                    min_rnr_timer: 12,
                    ird: 4,
                    rights: Access::REMOTE_READ,
                }),
            }),
            "ac0228ac020001010101010101010101010101010101020202020202020202020202020202\
                 0203ac0280080c0404",
        ),
        (request(RequestBody::QueryGids), "ac0229"),
        (
            request(RequestBody::ReregMr { mr: MrId(9), to: region }),
            "ac022a09070005802080408080808080200501ac02",
        ),
        (
            request(RequestBody::BindDatagrams { address: v6(), context: 6, v6_only: true }),
            "ac022b0120010db8000000000000000000000001b725070601",
        ),
        (request(RequestBody::ServeCopies { worker: 3 }), "ac022c03"),
        (
            request(RequestBody::BindRc {
                space: PortSpace::Ib,
                address: v4(),
                context: 6,
                v6_only: false,
            }),
            "ac022d0200c0000207af3a0600",
        ),
        (
            request(RequestBody::ConnectRc {
                qp: QpId(7),
                space: PortSpace::Tcp,
                peer: v4(),
                local: None,
                offer: offer(),
                private_data: vec![9, 8],
            }),
            "ac022e070000c0000207af3a00ac020102030480080901020908",
        ),
        (
            request(RequestBody::AcceptRc {
                request: RequestId(5),
                qp: QpId(7),
                offer: offer(),
                private_data: vec![9, 8],
            }),
            "ac022f0507ac020102030480080901020908",
        ),
        (request(RequestBody::EstablishRc { qp: QpId(7) }), "ac023007"),
        (
            request(RequestBody::AddDevice { name: "rxe0".into(), interface: "lo".into() }),
            "ac02310472786530026c6f",
        ),
        (request(RequestBody::RemoveDevice { name: "rxe0".into() }), "ac02320472786530"),
        (request(RequestBody::SetFaults { rules: "x".into(), own: true }), "ac0233017801"),
        (request(RequestBody::ClearFaults { name: Some("x".into()) }), "ac0234010178"),
        (request(RequestBody::Call(LibraryCall::PollCq { cq: CqId(3) })), "ac02350303"),
    ];
    check::<RequestBody>(2, &golden);
    for (Request { body, .. }, _) in &golden {
        let debug = format!("{body:?}");
        let variant = debug.trim_start_matches("Call(").split([' ', '(']).next();
        assert_eq!(variant, Some(body.info().name));
    }
}

#[test]
fn library_calls() {
    let golden = [
        (LibraryCall::PostSend { qp: QpId(300), opcode: 32 }, "00ac0220"),
        (LibraryCall::PostRecv { qp: QpId(300) }, "01ac02"),
        (LibraryCall::PostSrqRecv { srq: SrqId(3) }, "0203"),
        (LibraryCall::PollCq { cq: CqId(3) }, "0303"),
        (LibraryCall::ReqNotifyCq { cq: CqId(3) }, "0403"),
        (LibraryCall::CreateAh { pd: PdId(3) }, "0503"),
        (LibraryCall::QueryPort, "06"),
        (LibraryCall::QueryPkey, "07"),
        (LibraryCall::ResolveAddr { context: 300, peer: v4() }, "08ac0200c0000207af3a"),
        (LibraryCall::ResolveRoute { context: 300, peer: v4() }, "09ac0200c0000207af3a"),
        (LibraryCall::GetCqEvent, "0a"),
        (LibraryCall::GetCmEvent, "0b"),
        (LibraryCall::CmEvent { kind: 300, peer: Some(v4()) }, "0cac020100c0000207af3a"),
        (Function::GetDeviceList.call(), "0d0000"),
    ];
    check::<LibraryCall>(0, &golden);
    for (n, (call, _)) in golden.iter().enumerate() {
        let debug = format!("{call:?}");
        assert!(debug.split(' ').next() == Some(call.name()) || debug.starts_with("Function("));
        assert_eq!(call.bit(), 1 << n);
    }
    check::<CallObject>(
        0,
        &[
            (CallObject::None, "00"),
            (CallObject::Pd(PdId(3)), "0103"),
            (CallObject::Cq(CqId(3)), "0203"),
            (CallObject::Qp(QpId(300)), "03ac02"),
            (CallObject::Peer(v4()), "0400c0000207af3a"),
        ],
    );
}

/// The document lists the bits of all calls.
#[test]
fn bits_of_library_calls() {
    let text = include_str!("../../../docs/abi.md").split_whitespace().collect::<Vec<_>>();
    let listed = text.join(" ");
    for (n, name) in LibraryCall::names().enumerate() {
        assert!(listed.contains(&format!("{n} `{name}`")), "{n} {name}");
    }
    assert_eq!(Function::ALL.len(), variants::<Function>());
    for (n, function) in Function::ALL.iter().enumerate() {
        assert_eq!(postcard::to_stdvec(function).unwrap(), [n as u8]);
        assert_eq!(function.call().bit(), 1 << (13 + n));
    }
}

fn offer() -> RcOffer {
    RcOffer {
        psn: 300,
        responder_resources: 1,
        initiator_depth: 2,
        retry_count: 3,
        rnr_retry: 4,
        path_mtu: 1024,
        traffic_class: 9,
        srq: true,
    }
}

fn rc_peer() -> RcPeer {
    RcPeer {
        source: 1,
        gid: Gid([2; 16]),
        qp: QpId(3),
        psn: 300,
        responder_resources: 4,
        initiator_depth: 5,
        retry_count: 6,
        rnr_retry: 7,
        ack_timeout: 8,
        path_mtu: 1024,
        traffic_class: 9,
        srq: true,
    }
}

#[test]
fn qp_changes() {
    let rights = Access::REMOTE_READ;
    let wiring = Wiring {
        local: Gid([1; 16]),
        remote: Gid([2; 16]),
        remote_qp: QpId(3),
        rq_psn: 300,
        path_mtu: 1024,
        min_rnr_timer: 12,
        ird: 4,
        rights,
    };
    let sending = Sending { sq_psn: 300, timeout: 1, retry_count: 2, rnr_retry: 3, ord: 4 };
    check::<QpChange>(
        0,
        &[
            (
                QpChange::ReadyToReceive(wiring),
                "0001010101010101010101010101010101020202020202020202020202020202020\
                 3ac0280080c0404",
            ),
            (QpChange::ReadyToSend(sending), "01ac0201020304"),
            (QpChange::DrainSendQueue, "02"),
            (QpChange::Reset, "03"),
            (QpChange::Rights(rights), "0404"),
            (QpChange::MinRnrTimer(9), "0509"),
            (QpChange::ReceiveDatagrams { q_key: 300 }, "06ac02"),
            (QpChange::QKey(300), "07ac02"),
        ],
    );
}

#[test]
fn replies() {
    let reply = |body| Reply { id: 1, result: Ok(body), diagnosis_id: 0 };
    let qp_row = QpRow {
        qp: QpId(1),
        kind: QpType::Rc,
        session: SessionId(2),
        pd: PdId(3),
        srq: Some(SrqId(4)),
        state: QpState::Closing,
        path: "tcp".into(),
        addresses: Some(pair()),
        worker: Some(0),
        ird: 4,
        ord: 5,
        counters: QpCounters { sends_completed: 6, errors: 7, ..QpCounters::default() },
        terminate: Some((TerminateOrigin::Peer, TerminateCode { layer: 1, etype: 2, code: 3 })),
        remote_qp: Some(QpId(8)),
        rq_psn: 300,
        sq_psn: 301,
    };
    let rows = Rows::Listeners(vec![ListenerRow {
        listener: ListenerId(1),
        session: SessionId(2),
        address: v4(),
        backlog: 3,
        pending: 4,
        accepted: 5,
        rejected: 6,
    }]);
    check::<ReplyBody>(
        2,
        &[
            (reply(ReplyBody::Done), "01000000"),
            (
                reply(ReplyBody::Device(DeviceAttributes {
                    name: "rnicd0".into(),
                    version: "0.1.0".into(),
                    max_qps: 1,
                    max_wr_depth: 2,
                    max_sge: 3,
                    max_inline: 4,
                    max_cqs: 5,
                    max_cq_entries: 6,
                    max_mrs: 7,
                    max_shared_bytes: 8,
                    max_pds: 9,
                    max_ird: 10,
                    max_ord: 11,
                    direct_path: true,
                    max_windows: 12,
                    max_srqs: 13,
                    hw_ver: 15,
                    guid: 0x0200_5e00_5301_0001,
                    max_srq_wr: 16,
                    max_backlog: 17,
                    devices: vec![DeviceRow {
                        name: "rxe0".into(),
                        kind: DeviceKind::Roce,
                        guid: 0x0200_5e00_5301_0002,
                        vendor_id: 0x1425,
                        vendor_part_id: 14,
                        interface: "eth0".into(),
                        uverbs: 1,
                        gids: vec![3, NO_GID],
                        port_down: true,
                        p_key: 0x8001,
                        active_width: 2,
                        active_speed: 32,
                    }],
                    tree: "/t".into(),
                    profile: profile(),
                })),
                "01000106726e6963643005302e312e300102030405060708090a0b010c0d\
                 0f8180849885c09780021011010472786530018280849885c0978002a5280e\
                 0465746830010203ffff03018180020220022f7401700103312e3212131401151617180c\
                 19802080081a1b011c1d0100",
            ),
            (reply(ReplyBody::Pd { pd: PdId(1) }), "0100020100"),
            (reply(ReplyBody::SharedBuffer { buffer: SharedBufferId(2) }), "0100030200"),
            (reply(ReplyBody::Mr { mr: MrId(3), stag: Stag(0x1234_5678) }), "01000403f8acd1910100"),
            (reply(ReplyBody::Channel { channel: ChannelId(4) }), "0100050400"),
            (
                reply(ReplyBody::Cq {
                    cq: CqId(5),
                    queue: location(),
                    new_arena: Some(NewArena { arena: 1, length: 1 << 20 }),
                }),
                "01000605018020108001010180804000",
            ),
            (
                reply(ReplyBody::Qp {
                    qp: QpId(6),
                    sq: location(),
                    rq: Some(location()),
                    new_arena: None,
                }),
                "01000706018020108001010180201080010000",
            ),
            (
                reply(ReplyBody::QpInfo(qp_row)),
                "01000801010203010402037463700100c0000207af3a0120010db8000000000000000000000001b725070100040506000000000000070001010102030108ac02ad0200",
            ),
            (
                reply(ReplyBody::Listener { listener: ListenerId(7), address: v4() }),
                "0100090700c0000207af3a00",
            ),
            (
                reply(ReplyBody::Status(StatusInfo {
                    version: "0.1.0".into(),
                    device: "rnicd0".into(),
                    pid: 1000,
                    loopback: "direct".into(),
                    arena_bytes: 1 << 30,
                    terminates_received: 1,
                    ..StatusInfo::default()
                })),
                "01000a05302e312e3006726e69636430e80700000664697265637400000000000000000000008080808004000000010000000000000000",
            ),
            (
                reply(ReplyBody::Rows { rows, total: 33, next: 7 }),
                "01000b0401010200c0000207af3a03040506210700",
            ),
            (
                reply(ReplyBody::Window { window: MwId(1), stag: Stag(0x1234_5678) }),
                "01000c01f8acd1910100",
            ),
            (
                reply(ReplyBody::Srq { srq: SrqId(2), queue: location(), new_arena: None }),
                "01000d020180201080010000",
            ),
            (reply(ReplyBody::SrqInfo(srq_row())), "01000e010203800405060708090a00"),
            (
                reply(ReplyBody::Gids(vec![GidRow {
                    gid: Gid([1; 16]),
                    interface: "lo".into(),
                    interface_index: 1,
                    mtu: 300,
                }])),
                "01000f0101010101010101010101010101010101026c6f01ac0200",
            ),
            (
                reply(ReplyBody::Copies { queue: location(), new_arena: None }),
                "0100100180201080010000",
            ),
            (reply(ReplyBody::EventFollows), "01001100"),
            (reply(ReplyBody::Events { count: 2 }), "0100120200"),
        ],
    );
}

#[test]
fn rows() {
    let client = ClientRow {
        session: SessionId(1),
        pid: 1000,
        uid: 1001,
        command: "rcopy".into(),
        qps: 1,
        cqs: 2,
        mrs: 3,
        shared_bytes: 4096,
        arena_bytes: 65536,
        refusals: 5,
    };
    let cq = CqRow {
        cq: CqId(1),
        session: SessionId(2),
        capacity: 16,
        unread: 3,
        reserved: 4,
        qps: 5,
        completions: 6,
        in_error: true,
    };
    let mr = MrRow {
        mr: MrId(1),
        session: SessionId(2),
        pd: PdId(3),
        buffer: Some(SharedBufferId(4)),
        iova: 5,
        length: 6,
        access: Access::all(),
        scope: Scope::Pd,
    };
    check::<Rows>(
        0,
        &[
            (Rows::Clients(vec![client]), "000101d00fe9070572636f7079010203802080800405"),
            (Rows::Qps(vec![]), "0100"),
            (Rows::Cqs(vec![cq]), "02010102100304050601"),
            (Rows::Mrs(vec![mr]), "0301010203010405063f00"),
            (Rows::Listeners(vec![]), "0400"),
            (Rows::Srqs(vec![srq_row()]), "0501010203800405060708090a"),
            (
                Rows::Windows(vec![WindowRow {
                    window: MwId(1),
                    session: SessionId(2),
                    pd: PdId(3),
                    kind: WindowKind::Type1,
                    stag: Stag(0x100),
                    mr: Some(MrId(4)),
                }]),
                "06010102030080020104",
            ),
            (
                Rows::Pds(vec![PdRow {
                    pd: PdId(1),
                    name: Some("shared".into()),
                    session: None,
                    sessions: 2,
                    mrs: 3,
                    qps: 4,
                }]),
                "070101010673686172656400020304",
            ),
            (
                Rows::Limits(vec![LimitRow {
                    key: "limits.qps".into(),
                    scope: "device".into(),
                    limit: 64,
                    used: 3,
                }]),
                "08010a6c696d6974732e717073066465766963654003",
            ),
            (
                Rows::Diagnoses(vec![why()]),
                "090101020301040901720174010501060107010801090100c0000207af3a0120010db8000000000000000000000001b72507",
            ),
            (
                Rows::Events(vec![EventRecord {
                    sequence: 1,
                    time_ms: 2,
                    session: Some(SessionId(3)),
                    kind: "reloaded".into(),
                    text: "x".into(),
                }]),
                "0a01010201030872656c6f616465640178",
            ),
            (
                Rows::Faults(vec![FaultRow {
                    name: "flap".into(),
                    owner: 5,
                    session: Some(SessionId(3)),
                    seen: 6,
                    injected: 7,
                    in_effect: true,
                    rule: "x".into(),
                }]),
                "0b0104666c61700501030607010178",
            ),
        ],
    );
}

#[test]
fn diagnosis_kinds() {
    let code = TerminateCode { layer: 1, etype: 2, code: 3 };
    check::<DiagnosisKind>(
        0,
        &[
            (DiagnosisKind::Refused, "00"),
            (DiagnosisKind::Completion { wr_id: 1, status: CompletionStatus::WrFlush }, "010104"),
            (DiagnosisKind::Terminate { origin: TerminateOrigin::Peer, code }, "0201010203"),
            (DiagnosisKind::Lost, "03"),
            (DiagnosisKind::Ended, "04"),
            (DiagnosisKind::Dropped, "05"),
            (DiagnosisKind::Injected, "06"),
        ],
    );
}

#[test]
fn refusals() {
    let limit = Refusal::Limit { key: "limits.qps".into(), limit: 64, used: 64, wanted: 1 };
    let above = Refusal::AboveMaximum {
        field: "sq_depth".into(),
        value: 1 << 20,
        key: "limits.queue_depth".into(),
        limit: 16384,
    };
    check::<Refusal>(
        0,
        &[
            (limit, "000a6c696d6974732e717073404001"),
            (above, "010873715f6465707468808040126c696d6974732e71756575655f6465707468808001"),
            (Refusal::Invalid { field: "length".into(), why: "0".into() }, "02066c656e6774680130"),
            (Refusal::NoSuchObject { kind: "QP".into(), handle: 9 }, "0302515009"),
            (
                Refusal::InUse { kind: "CQ".into(), handle: 1, by: "QP 2".into() },
                "04024351010451502032",
            ),
            (
                Refusal::WrongState {
                    kind: "QP".into(),
                    handle: 1,
                    state: "Error".into(),
                    needs: "Idle".into(),
                },
                "0502515001054572726f720449646c65",
            ),
            (
                Refusal::NotAllowed { rule: "device.addresses".into(), what: "bind".into() },
                "06106465766963652e6164647265737365730462696e64",
            ),
            (
                Refusal::System { what: "bind".into(), error: "in use".into(), errno: 98 },
                "070462696e6406696e2075736562",
            ),
            (Refusal::Malformed { why: "short".into() }, "080573686f7274"),
            (Refusal::Draining, "09"),
            (
                Refusal::AboveProfile {
                    profile: "mlx5".into(),
                    key: "max_qp".into(),
                    limit: 8,
                    asked: 9,
                    errno: 12,
                },
                "0a046d6c7835066d61785f717008090c",
            ),
        ],
    );
    let refused: Result<ReplyBody, Refusal> = Err(Refusal::Malformed { why: "srq".into() });
    let encoded =
        postcard::to_stdvec(&Reply { id: 2, result: refused, diagnosis_id: 300 }).unwrap();
    assert_eq!(encoded, [2, 1, 8, 3, b's', b'r', b'q', 0xAC, 2]);
}

#[test]
fn events() {
    let qp = QpId(6);
    let context = 1 << 63;
    let ended = |reason| Event::Disconnected { qp, context: 0, reason };
    check::<Event>(
        0,
        &[
            (
                Event::ConnectionRequest {
                    listener: ListenerId(1),
                    context,
                    request: RequestId(2),
                    addresses: pair(),
                    peer_ird: Some(16),
                    peer_ord: None,
                    revision: 2,
                    peer_to_peer: true,
                    private_data: vec![0xAB; 3],
                },
                "0001808080808080808080010200c0000207af3a0120010db8000000000000000000000001b72507011000020103ababab",
            ),
            (
                Event::RequestWithdrawn {
                    listener: ListenerId(1),
                    context,
                    request: RequestId(2),
                    reason: "gone".into(),
                },
                "0101808080808080808080010204676f6e65",
            ),
            (
                Event::Established {
                    qp,
                    context,
                    addresses: pair(),
                    ird: 1,
                    ord: 2,
                    private_data: vec![],
                    revision: 2,
                },
                "02068080808080808080800100c0000207af3a0120010db8000000000000000000000001b7250701020002",
            ),
            (
                Event::Rejected { qp, context, private_data: vec![1] },
                "0306808080808080808080010101",
            ),
            (
                Event::Unreachable { qp, context, errno: 111, reason: "refused".into() },
                "0406808080808080808080016f0772656675736564",
            ),
            (ended(DisconnectReason::Orderly), "05060000"),
            (Event::CqError { cq: CqId(3), context }, "060380808080808080808001"),
            (
                Event::QpFatal { qp, context, reason: "dead".into() },
                "0706808080808080808080010464656164",
            ),
            (Event::EventsLost { count: 300 }, "08ac02"),
            (Event::PeerClosed { qp, context }, "090680808080808080808001"),
            (Event::SrqLimit { srq: SrqId(3), context }, "0a0380808080808080808001"),
            (Event::SrqError { srq: SrqId(3), context }, "0b0380808080808080808001"),
            (
                Event::SrqUnfair { srq: SrqId(3), context, qp, taken: 200, of_last: 256 },
                "0c038080808080808080800106c8018002",
            ),
            (Event::LastWqeReached { qp, context }, "0d0680808080808080808001"),
            (Event::Detached { reason: "exec".into() }, "0e0465786563"),
            (Event::PeerClosing { qp, context }, "0f0680808080808080808001"),
            (Event::CommunicationEstablished { qp, context }, "100680808080808080808001"),
            (Event::SendQueueDrained { qp, context }, "110680808080808080808001"),
            (
                Event::Resolved {
                    qp,
                    context,
                    addresses: pair(),
                    source: 3,
                    remote_qp: QpId(300),
                    q_key: 300,
                    private_data: vec![1, 2],
                },
                "1206808080808080808080\
                 0100c0000207af3a0120010db8000000000000000000000001b7250703ac02ac02020102",
            ),
            (Event::AccessError { qp, context }, "130680808080808080808001"),
            (Event::RequestError { qp, context }, "140680808080808080808001"),
            (Event::GidsChanged, "15"),
            (
                Event::RcRequest {
                    listener: ListenerId(1),
                    context,
                    request: RequestId(2),
                    addresses: pair(),
                    peer: rc_peer(),
                    private_data: vec![9],
                },
                "1601808080808080808080010200c0000207af3a0120010db8000000000000000000000001\
                 b72507010202020202020202020202020202020203ac020405060708800809010109",
            ),
            (
                Event::RcReply {
                    qp,
                    context,
                    addresses: pair(),
                    peer: rc_peer(),
                    private_data: vec![9],
                },
                "17068080808080808080800100c0000207af3a0120010db8000000000000000000000001b7\
                 2507010202020202020202020202020202020203ac020405060708800809010109",
            ),
            (
                Event::RcRejected { qp, context, reason: 28, private_data: vec![9] },
                "1806808080808080808080011c0109",
            ),
            (Event::DevicesChanged, "19"),
            (
                Event::Async { event: 10, object: AsyncObject::Device("rxe0".into()) },
                "1a0a000472786530",
            ),
            (Event::ResolutionFailed { context: 300, errno: 110 }, "1bac026e"),
            (Event::DeviceRemoved { device: "rxe0".into() }, "1c0472786530"),
            (
                Event::DatagramLost { qp, context, reason: "full".into() },
                "1d06808080808080808080010466756c6c",
            ),
        ],
    );
    let code = TerminateCode { layer: 0, etype: 1, code: 2 };
    let origin = TerminateOrigin::Local;
    check::<DisconnectReason>(
        3,
        &[
            (ended(DisconnectReason::Orderly), "05060000"),
            (
                ended(DisconnectReason::Terminate { origin, code, headers: vec![9, 8] }),
                "0506000100000102020908",
            ),
            (ended(DisconnectReason::Lost { why: "reset".into() }), "05060002057265736574"),
            (ended(DisconnectReason::Aborted), "05060003"),
        ],
    );
}
