//! Logins and discovery.

use super::*;

#[test]
fn a_login_with_the_same_ports_replaces_the_session() {
    let mut target = plain_target();
    let mut old = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    old.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    assert_eq!(old.read(&mut target).opcode(), Opcode::R2t);
    let mut new = Initiator::begin(&mut target, &[]);
    assert!(old.try_read(&mut target).is_none());
    assert_eq!(new.read_blocks(&mut target, 0, 1, 512), [0; 512]);
    assert_eq!(target.group.connections().len(), 1);
}

#[test]
fn logins_fail_with_the_status_that_says_why() {
    let mut target = plain_target();
    let name = ("InitiatorName", INITIATOR);
    for (keys, status) in [
        (vec![("TargetName", NODE)], LoginStatus::MissingParameter),
        (vec![name], LoginStatus::MissingParameter),
        (vec![name, ("TargetName", "iqn.2026-11.io.ringbolt:other")], LoginStatus::NotFound),
        (vec![name, ("SessionType", "Other")], LoginStatus::UnsupportedSessionType),
        (vec![name, ("TargetName", NODE), ("AuthMethod", "KRB5")], LoginStatus::AuthenticationFailed),
        (
            vec![name, ("TargetName", NODE), ("X", "1"), ("MaxRecvDataSegmentLength", "1")],
            LoginStatus::InitiatorError,
        ),
    ] {
        let mut initiator = Initiator::connect(&mut target);
        initiator.send(&mut target, &login(&keys));
        let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(response.status, u16::from(status), "{keys:?}");
        assert!(initiator.try_read(&mut target).is_none());
    }
    // Changes of the request itself.
    type Change = fn(&mut [u8]);
    let changes: [(Change, LoginStatus); 5] = [
        (|header| header[3] = 1, LoginStatus::UnsupportedVersion),
        (|header| header[1] = 0x8f, LoginStatus::InvalidRequest),
        (|header| header[1] = 0x85, LoginStatus::InvalidRequest),
        (|header| header[1] = 0xc7, LoginStatus::InvalidRequest),
        (|header| header[15] = 77, LoginStatus::NoSession),
    ];
    for (change, status) in changes {
        let mut initiator = Initiator::connect(&mut target);
        let mut bytes = login(&[name, ("TargetName", NODE)]);
        change(&mut bytes);
        initiator.send(&mut target, &bytes);
        let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!(response.status, u16::from(status));
    }
    // Anything else than a login.
    let mut initiator = Initiator::connect(&mut target);
    initiator.send(&mut target, &pdu(&NopOut::default().to_bytes(), &[]));
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn a_node_that_requires_digests_refuses_logins_without() {
    let mut target = plain_target();
    let digests = DigestPolicy { header_required: false, data_required: true };
    let core = target.reactor.core();
    target.group.apply(&core, Arc::new(config(digests)), 2);
    let mut initiator = Initiator::connect(&mut target);
    initiator.send(&mut target, &login(&[("InitiatorName", INITIATOR), ("TargetName", NODE)]));
    let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(response.status, u16::from(LoginStatus::InitiatorError));
    Initiator::begin(&mut target, &[("DataDigest", "None,CRC32C"), ("DataDigestX", "")]).data_digest = true;
}

#[test]
fn options_limit_sessions_and_their_commands() {
    let mut target = plain_target();
    let core = target.reactor.core();
    let mut limited = config(DigestPolicy::default());
    (limited.options.queue_depth_max, limited.options.sessions_max) = (3, 1);
    target.group.apply(&core, Arc::new(limited), 2);
    let mut log_in = |name| {
        let mut initiator = Initiator::connect(&mut target);
        initiator.send(&mut target, &login(&[("InitiatorName", name), ("TargetName", NODE)]));
        LoginResponse::decode(&initiator.read(&mut target).header).unwrap()
    };
    let first = log_in(INITIATOR);
    assert_eq!(
        (first.status, first.max_cmd_sn - first.exp_cmd_sn),
        (0, 2),
        "the node has a queue depth of 8"
    );
    assert_eq!(log_in("iqn.2026-11.io.ringbolt:other").status, u16::from(LoginStatus::OutOfResources));
}

#[test]
fn a_connection_reports_its_stage_and_its_session_when_there_is_one() {
    let mut target = plain_target();
    let mut initiator = Initiator::connect(&mut target);
    let info = |target: &SimulatedTarget| {
        let peer = StreamAddress::Tcp(([10, 0, 0, 9], 4000).into());
        target.group.connections().open().next().map(|connection| connection.info(&peer))
    };
    target.poll();
    let before = info(&target).unwrap();
    assert_eq!((before.stage, before.tsih, before.initiator.as_str()), (LoginStage::Security, None, ""));
    assert_eq!(before.local, Some(address()));
    initiator.send(
        &mut target,
        &login(&[("InitiatorName", INITIATOR), ("TargetName", NODE), ("HeaderDigest", "CRC32C")]),
    );
    let response = LoginResponse::decode(&initiator.read(&mut target).header).unwrap();
    let after = info(&target).unwrap();
    assert_eq!((after.stage, after.tsih), (LoginStage::FullFeature, Some(response.tsih)));
    assert_eq!((after.initiator.as_str(), after.node.as_deref()), (INITIATOR, Some(NODE)));
    assert!(after.header_digest && !after.data_digest && !after.is_draining);
}

#[test]
fn discovery_lists_targets_in_pieces_that_the_initiator_takes() {
    let mut target = plain_target();
    let mut initiator = Initiator::connect(&mut target);
    let keys =
        [("InitiatorName", INITIATOR), ("SessionType", "Discovery"), ("MaxRecvDataSegmentLength", "512")];
    initiator.send(&mut target, &login(&keys));
    assert_eq!(LoginResponse::decode(&initiator.read(&mut target).header).unwrap().status, 0);
    let mut request = TextRequest {
        is_final: true,
        target_transfer_tag: RESERVED_TAG,
        initiator_task_tag: 1,
        cmd_sn: 1,
        ..TextRequest::default()
    };
    let unknown = format!("SendTargets=All\0{}", "X-a=b\0".repeat(30));
    initiator.send_pdu(&mut target, &request.to_bytes(), unknown.as_bytes());
    let mut text = Vec::new();
    loop {
        let received = initiator.read(&mut target);
        assert!(received.data.len() <= 512);
        text.extend(received.data);
        let response = TextResponse::decode(&received.header).unwrap();
        if response.is_final {
            assert_eq!(response.target_transfer_tag, RESERVED_TAG);
            break;
        }
        assert!(response.is_continued);
        request.target_transfer_tag = response.target_transfer_tag;
        request.cmd_sn += 1;
        initiator.send_pdu(&mut target, &request.to_bytes(), &[]);
    }
    let expected = format!("TargetName={NODE}\0TargetAddress=10.0.0.1:3260,1\0");
    assert_eq!(String::from_utf8(text).unwrap(), expected + &"X-a=NotUnderstood\0".repeat(30));
    // Commands are for sessions with a target.
    initiator.cmd_sn = request.cmd_sn + 1;
    initiator.command(&mut target, [0; 16], 0, (false, false), &[], true);
    assert_eq!(initiator.read(&mut target).opcode(), Opcode::Reject);
}
