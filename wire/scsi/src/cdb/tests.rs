use proptest::prelude::*;

use super::*;

fn decode(bytes: &[u8]) -> Cdb {
    Cdb::decode(bytes).unwrap()
}

fn blocks(lba: u64, blocks: u32) -> BlockRange {
    BlockRange { lba, blocks, ..BlockRange::default() }
}

#[test]
fn reads_and_writes_of_every_length_have_the_fields_of_sbc_4() {
    // CDBs as sg_dd and libiscsi send them.
    let (dpo, fua) = (RangeFlags::DPO, RangeFlags::FUA);
    let read = [0x08, 0x1f, 0xff, 0xfe, 0x02, 0];
    assert_eq!(decode(&read), Cdb::Read(blocks(0x1f_fffe, 2)));
    assert_eq!(decode(&[0x0a, 0xe0, 0, 1, 0, 0]), Cdb::Write(blocks(1, 256)), "0 blocks are 256");
    let write = [0x2a, 0x18, 0x12, 0x34, 0x56, 0x78, 0, 0x01, 0x02, 0];
    assert_eq!(decode(&write), Cdb::Write(BlockRange { flags: dpo | fua, ..blocks(0x1234_5678, 0x102) }));
    let read = [0xa8, 0x20, 0, 0, 0, 9, 0, 1, 0, 0, 0, 0];
    assert_eq!(decode(&read), Cdb::Read(BlockRange { protect: 1, ..blocks(9, 0x1_0000) }));
    let read = [0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 1, 0, 0];
    assert_eq!(decode(&read), Cdb::Read(blocks(0x0102_0304_0506_0708, 1)));
    let swap = [0x89, 0x08, 0, 0, 0, 0, 0, 0, 0, 7, 9, 9, 9, 3, 0, 0];
    assert_eq!(decode(&swap), Cdb::CompareAndWrite(BlockRange { flags: fua, ..blocks(7, 3) }));
    let atomic = [0x9c, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 2, 0, 8, 0, 0];
    assert_eq!(decode(&atomic), Cdb::WriteAtomic { range: blocks(7, 8), boundary_blocks: 2 });
    let verify = [0x2f, 0x12, 0, 0, 0, 5, 0, 0, 1, 0];
    assert_eq!(
        decode(&verify),
        Cdb::Verify { range: BlockRange { flags: dpo, ..blocks(5, 1) }, byte_check: 1 }
    );
    let same = [0x93, 0x19, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0];
    let flags = RangeFlags::UNMAP | RangeFlags::ANCHOR | RangeFlags::NO_DATA;
    assert_eq!(decode(&same), Cdb::WriteSame(BlockRange { flags, ..blocks(5, 6) }));
}

#[test]
fn commands_without_blocks_have_the_fields_of_spc_4() {
    assert_eq!(decode(&[0; 6]), Cdb::TestUnitReady);
    let inquiry = [0x12, 1, 0x83, 1, 0xfe, 0];
    assert_eq!(decode(&inquiry), Cdb::Inquiry { page: Some(0x83), allocation: 0x1fe });
    let capacity = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
    assert_eq!(decode(&capacity), Cdb::ReadCapacity16 { lba: 0, partial: false, allocation: 32 });
    let sense = [0x5a, 0x18, 0xbf, 0xff, 0, 0, 0, 0x12, 0x34, 0];
    let expected = Cdb::ModeSense {
        ten: true,
        long_lba: true,
        no_blocks: true,
        page_control: 2,
        page: 0x3f,
        subpage: 0xff,
        allocation: 0x1234,
    };
    assert_eq!(decode(&sense), expected);
    let out = [0x5f, 0x03, 0x05, 0, 0, 0, 0, 0, 24, 0];
    assert_eq!(decode(&out), Cdb::PersistentReserveOut { action: 3, scope: 0, kind: 5, parameter_bytes: 24 });
    let opcodes = [0xa3, 0x0c, 0x82, 0x9e, 0, 0x10, 0, 0, 1, 0, 0, 0];
    let expected = Cdb::ReportSupportedOpcodes {
        timeouts: true,
        options: 2,
        opcode: 0x9e,
        action: 0x10,
        allocation: 256,
    };
    assert_eq!(decode(&opcodes), expected);
}

#[test]
fn invalid_fields_are_named() {
    let error = |bytes: &[u8]| Cdb::decode(bytes).unwrap_err();
    assert_eq!(error(&[]), CdbError::Opcode);
    assert_eq!(error(&[0x28; 9]), CdbError::Opcode, "it is cut off");
    assert_eq!(error(&[0xc1; 16]), CdbError::Opcode);
    assert_eq!(error(&[0x7f; 32]), CdbError::Opcode);
    assert_eq!(error(&[0x12, 0, 0x80, 0, 96, 0]), CdbError::Field { byte: 2, bit: None });
    assert_eq!(error(&[0, 0, 0, 0, 0, 4]), CdbError::Field { byte: 5, bit: Some(2) }, "NACA");
    let sanitize = |at: usize, value| {
        let mut cdb = [0x48, 2, 0, 0, 0, 0, 0, 0, 0, 0];
        cdb[at] = value;
        Cdb::decode(&cdb)
    };
    assert!(sanitize(1, 0x82).is_ok());
    assert_eq!(sanitize(1, 0x42), Err(CdbError::Field { byte: 1, bit: Some(6) }));
    assert_eq!(sanitize(1, 0x04), Err(CdbError::Field { byte: 1, bit: Some(4) }));
    for at in 2..7 {
        assert_eq!(sanitize(at, 1), Err(CdbError::Field { byte: at as u16, bit: None }));
    }
    assert_eq!(error(&[0x16, 0x10, 0, 0, 0, 0]).sense(), Sense::invalid_field(1, Some(4)));
}

#[test]
fn usage_data_names_every_command_that_is_decoded() {
    let mut previous = None;
    for command in CommandBits::ALL {
        assert_eq!(command.usage[0], command.opcode);
        assert_eq!(Some(command.usage.len()), cdb_bytes(command.opcode));
        let key = (command.opcode, command.action);
        assert!(previous.is_none_or(|previous| previous < key), "{key:x?} is in order");
        previous = Some(key);
        let mut cdb = vec![0; command.usage.len()];
        cdb[0] = command.opcode;
        cdb[1] = command.action.unwrap_or(0);
        assert!(Cdb::decode(&cdb).is_ok(), "{key:x?} is decoded");
    }
    for opcode in 0..=u8::MAX {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        let is_known = (0..0x20).any(|action| {
            cdb[1] = action;
            Cdb::decode(&cdb).is_ok()
        });
        assert_eq!(is_known, CommandBits::find(opcode, None).is_some(), "{opcode:#x}");
    }
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_or_rejected(bytes in prop::collection::vec(any::<u8>(), 0..34)) {
        if let Ok(cdb) = Cdb::decode(&bytes) {
            // What follows a CDB does not change it.
            let longer = [&bytes[..], &[0xa5; 8]].concat();
            prop_assert_eq!(Cdb::decode(&longer), Ok(cdb));
        }
    }
}
