//! Bytes of RFC 7143's figures, and text of its examples.
#![allow(clippy::unwrap_used)]

use wire_iscsi::*;

fn bytes(hex: &str) -> [u8; HEADER_BYTES] {
    let digits: Vec<u8> = hex.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    let text = String::from_utf8(digits).unwrap();
    wire_iscsi::text::binary(&format!("0x{text}"), HEADER_BYTES).unwrap().try_into().unwrap()
}

/// The CRC example of RFC 3720, appendix B.4: the header of a READ(10) and its digest, as RFC 7143 keeps them.
#[test]
fn a_read_command_and_its_digest_are_those_of_the_rfc() {
    let from = bytes(
        "01c00000 00000000 00000000 00000000 14000000 00000400 00000014 00000018
         28000000 00000000 02000000 00000000",
    );
    let command = ScsiCommand::decode(&from).unwrap();
    assert_eq!(
        command,
        ScsiCommand {
            is_final: true,
            read: true,
            initiator_task_tag: 0x1400_0000,
            expected_length: 1024,
            cmd_sn: 0x14,
            exp_stat_sn: 0x18,
            cdb: [0x28, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0],
            ..Default::default()
        }
    );
    assert_eq!(command.to_bytes(), from);
    // In the order of transmission.
    assert_eq!(digest(&[&from]), [0x56, 0x3a, 0x96, 0xd9]);
}

#[test]
fn login_headers_have_their_fields_where_the_figures_show_them() {
    let from = bytes(
        "43870000 000000c5 4000013700010000 00000011 0001 0000 00000002 00000003
         00000000 00000000 00000000 00000000",
    );
    let login = LoginRequest {
        immediate: true,
        transit: true,
        current_stage: LoginStage::Operational.into(),
        next_stage: LoginStage::FullFeature.into(),
        data_length: 0xc5,
        isid: [0x40, 0, 1, 0x37, 0, 1],
        initiator_task_tag: 0x11,
        cid: 1,
        cmd_sn: 2,
        exp_stat_sn: 3,
        ..Default::default()
    };
    assert_eq!(LoginRequest::decode(&from).unwrap(), login);
    assert_eq!(login.to_bytes(), from);
    let from = bytes(
        "23870000 00000010 4000013700010007 00000011 00000000 00000003 00000002 00000022
         02010000 00000000 00000000",
    );
    let response = LoginResponse {
        transit: true,
        current_stage: 1,
        next_stage: 3,
        data_length: 16,
        isid: [0x40, 0, 1, 0x37, 0, 1],
        tsih: 7,
        initiator_task_tag: 0x11,
        stat_sn: 3,
        exp_cmd_sn: 2,
        max_cmd_sn: 0x22,
        status: LoginStatus::AuthenticationFailed.into(),
        ..Default::default()
    };
    assert_eq!(LoginResponse::decode(&from).unwrap(), response);
    assert_eq!(response.to_bytes(), from);
}

#[test]
fn data_headers_have_their_fields_where_the_figures_show_them() {
    let from = bytes(
        "05800000 00001000 0001000000000000 0000000a 0000000b 00000000 0000000c 00000000
         00000002 00002000 00000000",
    );
    let out = DataOut {
        is_final: true,
        data_length: 4096,
        lun: 1 << 48,
        initiator_task_tag: 10,
        target_transfer_tag: 11,
        exp_stat_sn: 12,
        data_sn: 2,
        buffer_offset: 8192,
    };
    assert_eq!((DataOut::decode(&from).unwrap(), out.to_bytes()), (out, from));
    let from = bytes(
        "25830002 00001000 0000000000000000 0000000a ffffffff 00000001 00000002 00000003
         00000004 00000005 00000006",
    );
    let data = DataIn {
        is_final: true,
        underflow: true,
        has_status: true,
        status: 2,
        data_length: 4096,
        initiator_task_tag: 10,
        target_transfer_tag: RESERVED_TAG,
        stat_sn: 1,
        exp_cmd_sn: 2,
        max_cmd_sn: 3,
        data_sn: 4,
        buffer_offset: 5,
        residual: 6,
        ..Default::default()
    };
    assert_eq!((DataIn::decode(&from).unwrap(), data.to_bytes()), (data, from));
    let from = bytes(
        "31800000 00000000 0001000000000000 0000000a 0000000b 00000001 00000002 00000003
         00000004 00000005 00000006",
    );
    let r2t = R2t {
        lun: 1 << 48,
        initiator_task_tag: 10,
        target_transfer_tag: 11,
        stat_sn: 1,
        exp_cmd_sn: 2,
        max_cmd_sn: 3,
        r2t_sn: 4,
        buffer_offset: 5,
        desired_length: 6,
        ..Default::default()
    };
    assert_eq!((R2t::decode(&from).unwrap(), r2t.to_bytes()), (r2t, from));
}

#[test]
fn other_headers_have_their_fields_where_the_figures_show_them() {
    let from = bytes(
        "42850000 00000000 0001000000000000 0000000a 0000000b 0000000c 0000000d 0000000e
         0000000f 00000000 00000000",
    );
    let function = TaskManagementRequest {
        immediate: true,
        function: TaskFunction::LogicalUnitReset.into(),
        lun: 1 << 48,
        initiator_task_tag: 10,
        referenced_task_tag: 11,
        cmd_sn: 12,
        exp_stat_sn: 13,
        ref_cmd_sn: 14,
        exp_data_sn: 15,
        ..Default::default()
    };
    assert_eq!((TaskManagementRequest::decode(&from).unwrap(), function.to_bytes()), (function, from));
    let from = bytes(
        "21820102 00000014 0000000000000000 0000000a 00000000 0000000b 0000000c 0000000d
         0000000e 00000000 0000000f",
    );
    let response = ScsiResponse {
        underflow: true,
        response: ScsiServiceResponse::TargetFailure.into(),
        status: 2,
        data_length: 20,
        initiator_task_tag: 10,
        stat_sn: 11,
        exp_cmd_sn: 12,
        max_cmd_sn: 13,
        exp_data_sn: 14,
        residual: 15,
        ..Default::default()
    };
    assert_eq!((ScsiResponse::decode(&from).unwrap(), response.to_bytes()), (response, from));
    let from = bytes(
        "32800000 00000000 0000000000000000 ffffffff 00000000 0000000b 0000000c 0000000d
         01020003 00040005 00000000",
    );
    let message = AsyncMessage {
        initiator_task_tag: RESERVED_TAG,
        stat_sn: 11,
        exp_cmd_sn: 12,
        max_cmd_sn: 13,
        event: AsyncEvent::LogoutRequested.into(),
        vendor_code: 2,
        parameter1: 3,
        parameter2: 4,
        parameter3: 5,
        ..Default::default()
    };
    assert_eq!((AsyncMessage::decode(&from).unwrap(), message.to_bytes()), (message, from));
    let from = bytes(
        "26800300 00000000 0000000000000000 0000000a 00000000 0000000b 0000000c 0000000d
         00000000 00020014 00000000",
    );
    let logout = LogoutReply {
        response: LogoutResponse::CleanupFailed.into(),
        initiator_task_tag: 10,
        stat_sn: 11,
        exp_cmd_sn: 12,
        max_cmd_sn: 13,
        time_to_wait: 2,
        time_to_retain: 20,
        ..Default::default()
    };
    assert_eq!((LogoutReply::decode(&from).unwrap(), logout.to_bytes()), (logout, from));
    let from = bytes(
        "46810000 00000000 0000000000000000 0000000a 00030000 0000000c 0000000d 00000000
         00000000 00000000 00000000",
    );
    let request = LogoutRequest {
        immediate: true,
        reason: LogoutReason::CloseConnection.into(),
        initiator_task_tag: 10,
        cid: 3,
        cmd_sn: 12,
        exp_stat_sn: 13,
        ..Default::default()
    };
    assert_eq!((LogoutRequest::decode(&from).unwrap(), request.to_bytes()), (request, from));
}

/// RFC 7143, section 6.1 and appendix B's examples of a login.
#[test]
fn text_is_pairs_that_end_with_nul() {
    let text = b"InitiatorName=iqn.1999-07.com.os:hostid.77\0TargetAlias=\0AuthMethod=KRB5,CHAP,None\0\0";
    let pairs: Vec<_> = TextKeys::new(text).map(Result::unwrap).collect();
    let expected = [
        ("InitiatorName", "iqn.1999-07.com.os:hostid.77"),
        ("TargetAlias", ""),
        ("AuthMethod", "KRB5,CHAP,None"),
    ];
    assert_eq!(pairs, expected);
    let mut written = TextWriter::default();
    pairs.iter().for_each(|(key, value)| written.push(key, value));
    assert_eq!(written.bytes(), &text[..text.len() - 1]);
    let long = format!("{}=1\0", "k".repeat(64));
    let huge = format!("k={}\0", "v".repeat(text::VALUE_BYTES_MAX + 1));
    let invalid: [&[u8]; 7] =
        [b"a=b", b"ab\0", b"=b\0", b"a b=c\0", b"a=\xff\0", long.as_bytes(), huge.as_bytes()];
    for text in invalid {
        assert!(TextKeys::new(text).any(|pair| pair.is_err()), "{text:?}");
    }
}

#[test]
fn values_have_the_forms_of_the_rfc() {
    assert_eq!(text::number("8192"), Ok(8192));
    assert_eq!(text::number("0x1F"), Ok(31));
    for wrong in ["", "-1", "+1", "0x", "0x+1", "1 ", "18446744073709551616"] {
        assert!(text::number(wrong).is_err(), "{wrong:?}");
    }
    assert_eq!(text::range("4~16"), Ok((4, 16)));
    assert!(text::range("16~4").is_err() && text::range("4").is_err());
    assert_eq!((text::boolean("Yes"), text::boolean("No")), (Ok(true), Ok(false)));
    assert!(text::boolean("yes").is_err());
    assert_eq!(text::binary("0x0a1B", 2), Ok(vec![10, 27]));
    assert_eq!(text::binary("0xa1b", 2), Ok(vec![10, 27]));
    assert_eq!(text::binary("0bChs=", 2), Ok(vec![10, 27]));
    for wrong in ["0a1b", "0xzz", "0b???", "0x0a1b2c", "", "0xß"] {
        assert!(text::binary(wrong, 2).is_err(), "{wrong:?}");
    }
    assert_eq!(text::to_hex(&[10, 27]), "0x0a1b");
}
