//! Data of commands: how it is sent, residuals, wrong sequences, digests.

use super::*;

#[test]
fn data_arrives_however_it_is_sent_and_the_stream_is_cut() {
    for seed in 0..24 {
        let mut random = WyRand::new(seed);
        let faults = NetworkFaults { cut_per_mille: 500, stall_per_mille: 200, break_per_mille: 0 };
        let mut target = SimulatedTarget::new(seed, faults);
        let digest = if random.below(2) == 0 { "CRC32C" } else { "None" };
        let keys = [
            ("HeaderDigest", digest),
            ("DataDigest", digest),
            ("InitialR2T", "No"),
            ("MaxBurstLength", "16384"),
            ("FirstBurstLength", "8192"),
            ("MaxOutstandingR2T", "3"),
            ("MaxRecvDataSegmentLength", "1000"),
        ];
        let mut initiator = Initiator::begin(&mut target, &keys);
        let mut disk = vec![0; DISK_BYTES];
        for _ in 0..20 {
            let blocks = 1 + random.below(200) as usize;
            let lba = random.below(1000) as usize;
            let data: Vec<u8> = (0..blocks * BLOCK_BYTES).map(|_| random.below(256) as u8).collect();
            let unasked = random.below(8193.min(data.len() as u64 + 1)) as usize;
            let immediate = random.below(unasked as u64 + 1) as usize;
            // Unsolicited data is all of the first burst, or none.
            let first_burst = 8192.min(data.len());
            let unsolicited = if random.below(2) == 0 { 0 } else { first_burst - immediate };
            let segment = 1 + random.below(9000) as usize;
            initiator.write(&mut target, lba as u32, &data, immediate, unsolicited, segment.max(64));
            disk[lba * BLOCK_BYTES..][..data.len()].copy_from_slice(&data);
        }
        for lba in (0..1200).step_by(150) {
            let read = initiator.read_blocks(&mut target, lba as u32, 150, 150 * BLOCK_BYTES as u32);
            assert!(read == disk[lba * BLOCK_BYTES..][..read.len()], "seed {seed}");
            assert_eq!(read.len(), 150 * BLOCK_BYTES);
        }
    }
}

#[test]
fn residuals_say_what_was_not_transferred() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    for (expected, residual, overflow) in [(2000, 1488, false), (300, 212, true), (512, 0, false)] {
        initiator.command(&mut target, transfer(READ, 0, 1), expected, (true, false), &[], true);
        let received = initiator.read(&mut target);
        let pdu = DataIn::decode(&received.header).unwrap();
        assert_eq!(received.data.len(), 512.min(expected as usize));
        assert_eq!(
            (pdu.residual, pdu.overflow, pdu.underflow),
            (residual, overflow, residual > 0 && !overflow)
        );
    }
    // The initiator has more data than blocks.
    initiator.command(&mut target, transfer(WRITE, 0, 1), 2048, (false, true), &[7; 2048], true);
    let response = initiator.read(&mut target).response();
    assert_eq!((response.status, response.residual, response.underflow), (0, 1536, true));
    assert_eq!(initiator.read_blocks(&mut target, 0, 2, 1024)[..513], [[7; 512].as_slice(), &[0]].concat());
}

#[test]
fn wrong_sequences_of_data_fail_the_command_and_nothing_else() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[("ImmediateData", "No")]);
    let data = [9; 4096];
    // What differs from the right answer, and the sense code: sequence error, or incorrect amount of data.
    type Change = fn(&mut DataOut);
    let changes: [(Change, (u8, u8)); 4] = [
        (|pdu| pdu.data_sn = 27, (0x47, 5)),
        (|pdu| pdu.buffer_offset = 512, (0x47, 5)),
        (|pdu| pdu.target_transfer_tag ^= 1, (0x47, 5)),
        (|pdu| pdu.target_transfer_tag = RESERVED_TAG, (0x0c, 0x0c)),
    ];
    for (change, sense) in changes {
        initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
        let r2t = R2t::decode(&initiator.read(&mut target).header).unwrap();
        assert_eq!((r2t.buffer_offset, r2t.desired_length), (0, 4096));
        let mut pdu = DataOut {
            initiator_task_tag: r2t.initiator_task_tag,
            target_transfer_tag: r2t.target_transfer_tag,
            is_final: true,
            ..DataOut::default()
        };
        change(&mut pdu);
        initiator.data_out(&mut target, pdu, &data[pdu.buffer_offset as usize..]);
        assert_eq!(initiator.read(&mut target).sense(), sense);
    }
    // A sequence that ends early.
    initiator.command(&mut target, transfer(WRITE, 0, 8), 4096, (false, true), &[], true);
    let r2t = R2t::decode(&initiator.read(&mut target).header).unwrap();
    let pdu = DataOut {
        initiator_task_tag: r2t.initiator_task_tag,
        target_transfer_tag: r2t.target_transfer_tag,
        is_final: true,
        ..DataOut::default()
    };
    initiator.data_out(&mut target, pdu, &data[..512]);
    assert_eq!(initiator.read(&mut target).sense(), (0x0c, 0x0d));
    // What comes for it afterwards is dropped.
    initiator.data_out(&mut target, DataOut { buffer_offset: 512, ..pdu }, &data[..512]);
    // Immediate data that was not negotiated.
    initiator.command(&mut target, transfer(WRITE, 0, 1), 512, (false, true), &data[..512], true);
    assert_eq!(initiator.read(&mut target).sense(), (0x0c, 0x0c));
    assert_eq!(initiator.read_blocks(&mut target, 0, 8, 4096), [0; 4096]);
}

#[test]
fn a_wrong_data_digest_fails_the_command_and_a_wrong_header_digest_ends_the_connection() {
    let mut target = plain_target();
    let keys = [("HeaderDigest", "CRC32C"), ("DataDigest", "CRC32C")];
    let mut initiator = Initiator::begin(&mut target, &keys);
    let command = |initiator: &mut Initiator| {
        initiator.cmd_sn += 1;
        let command = ScsiCommand {
            initiator_task_tag: 1,
            is_final: true,
            write: true,
            expected_length: 512,
            cmd_sn: initiator.cmd_sn - 1,
            cdb: transfer(WRITE, 0, 1),
            ..ScsiCommand::default()
        };
        let plain = pdu(&command.to_bytes(), &[5; 512]);
        let (header, data) = plain.split_at(HEADER_BYTES);
        [header, &digest(&[header]), data, &digest(&[data])].concat()
    };
    let mut bytes = command(&mut initiator);
    bytes[100] ^= 1;
    initiator.send(&mut target, &bytes);
    let reject = Reject::decode(&initiator.read(&mut target).header).unwrap();
    assert_eq!(reject.reason, u8::from(RejectReason::DataDigestError));
    assert_eq!(initiator.read(&mut target).sense(), (0x47, 5));
    bytes = command(&mut initiator);
    initiator.send(&mut target, &bytes);
    assert_eq!(initiator.read(&mut target).response().status, 0);
    bytes = command(&mut initiator);
    bytes[30] ^= 1;
    initiator.send(&mut target, &bytes);
    assert!(initiator.try_read(&mut target).is_none());
}

#[test]
fn a_copy_reaches_the_other_units_of_the_session() {
    let mut target = plain_target();
    let mut initiator = Initiator::begin(&mut target, &[]);
    let data: Vec<u8> = (0..8 * BLOCK_BYTES).map(|at| (at / 3) as u8).collect();
    initiator.write(&mut target, 16, &data, data.len(), 0, 4096);
    // Eight blocks of LUN 0 to LUN 1, and from there back to another place.
    let mut list = vec![0, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 56, 0, 0, 0, 0];
    for lun in 0..2 {
        list.extend([0xe4, 0, 0, 0, 1, 0x0a, 0, 18, 0x10, 0]);
        list.extend(unit_uuid(lun).as_bytes());
        list.extend([0; 6]);
    }
    for (source, from, to) in [(0, 16, 4000), (1, 4000, 64)] {
        let segment = wire_scsi::copy::CopySegment {
            source,
            destination: 1 - source,
            blocks: 8,
            source_lba: from,
            destination_lba: to,
        };
        list.extend(segment.encode());
    }
    let mut cdb = [0; 16];
    (cdb[0], cdb[13]) = (0x83, list.len() as u8);
    initiator.command(&mut target, cdb, list.len() as u32, (false, true), &list, true);
    let response = initiator.read(&mut target).response();
    assert_eq!((response.status, response.residual), (0, 0));
    assert_eq!(initiator.read_blocks(&mut target, 64, 8, data.len() as u32), data);
    assert_eq!(initiator.read_blocks(&mut target, 4000, 1, 512), [0; BLOCK_BYTES]);
}

#[test]
fn a_command_waits_for_a_bounded_number_of_commands_of_other_sessions() {
    const OTHERS: usize = 8;
    // As many as the target node admits, each with data that counts as eight commands.
    const BURST: usize = 8;
    const BLOCKS: u16 = 512;
    let mut target = plain_target();
    let mut initiators: Vec<_> = (0..=OTHERS)
        .map(|number| {
            let mut initiator = Initiator::connect(&mut target);
            let name = format!("{INITIATOR}{number}");
            initiator.send(&mut target, &login(&[("InitiatorName", &name), ("TargetName", NODE)]));
            initiator.read(&mut target);
            initiator.command(&mut target, [0; 16], 0, (false, false), &[], true);
            initiator.read(&mut target);
            initiator
        })
        .collect();
    let mut honest = initiators.pop().unwrap();
    let before = target.reads();
    let length = u32::from(BLOCKS) * BLOCK_BYTES as u32;
    for initiator in &mut initiators {
        for _ in 0..BURST {
            initiator.command(&mut target, transfer(READ, 0, BLOCKS), length, (true, false), &[], true);
        }
    }
    honest.command(&mut target, transfer(READ, 0, 1), 512, (true, false), &[], true);
    assert_eq!(target.reads(), before, "nothing was sent in turns before");
    honest.read(&mut target);
    // What all others may begin in the turn in which it arrives, and no later ones: they are at most half of their commands.
    let begun = target.reads() - before;
    assert!(begun <= (OTHERS * BURST / 2) as u64 + 1, "{begun} commands came first");
    for initiator in &mut initiators {
        for _ in 0..BURST {
            while !DataIn::decode(&initiator.read(&mut target).header).unwrap().has_status {}
        }
    }
    assert_eq!(target.reads() - before, (OTHERS * BURST) as u64 + 1, "every command is executed");
}
