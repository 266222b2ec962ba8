use wire_ioat::registers;

use super::*;

/// Memory from address 0 on.
struct Flat(Vec<u8>);

impl ModelMemory for Flat {
    fn read(&mut self, address: u64, out: &mut [u8]) -> bool {
        let from = address as usize;
        self.0.get(from..from + out.len()).map(|bytes| out.copy_from_slice(bytes)).is_some()
    }

    fn write(&mut self, address: u64, data: &[u8]) -> bool {
        let to = address as usize;
        self.0.get_mut(to..to + data.len()).map(|bytes| bytes.copy_from_slice(data)).is_some()
    }

    fn write_word(&mut self, address: u64, word: u64) -> bool {
        self.write(address, &word.to_le_bytes())
    }
}

const RING_AT: u64 = 0x400;
const COMPLETION_AT: u64 = 0x3c0;

fn started(ops: &[DescriptorOp]) -> (IoatModel, Flat) {
    let (mut model, mut memory) = (IoatModel::new(), Flat(vec![0; 0x1000]));
    for (index, op) in (0..).zip(ops) {
        let at = RING_AT + index * DESCRIPTOR_BYTES as u64;
        let words = IoatDescriptor { op: *op, reports: true, next: at + DESCRIPTOR_BYTES as u64 }.encode();
        for (word, at) in words.iter().zip((at..).step_by(8)) {
            assert!(memory.write_word(at, *word));
        }
    }
    model.write(CHANNEL_CONTROL, 2, (CONTROL_ABORT_ON_ERROR | CONTROL_REPORT_ERROR).into());
    model.write(COMPLETION_ADDRESS, 8, COMPLETION_AT);
    model.write(CHAIN_ADDRESS, 8, RING_AT);
    model.write(DESCRIPTOR_COUNT, 2, ops.len() as u64);
    (model, memory)
}

fn completion(memory: &mut Flat) -> ChannelStatus {
    let mut word = [0; 8];
    assert!(memory.read(COMPLETION_AT, &mut word));
    ChannelStatus::decode(u64::from_le_bytes(word))
}

#[test]
fn descriptors_are_executed_in_order_and_the_status_is_written_to_memory() {
    let fill = DescriptorOp::Fill { pattern: 0x0807_0605_0403_0201, to: 0x100, bytes: 12 };
    let copy = DescriptorOp::Copy { from: 0x102, to: 0x200, bytes: 8 };
    let (mut model, mut memory) = started(&[DescriptorOp::Null, fill, copy]);
    assert!(model.step(2, &mut memory));
    assert_eq!(
        completion(&mut memory),
        ChannelStatus { state: ChannelState::Active, completed: RING_AT + 64 }
    );
    assert_eq!(memory.0[0x100..0x10d], [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 0]);
    assert!(model.step(2, &mut memory));
    assert_eq!(
        completion(&mut memory),
        ChannelStatus { state: ChannelState::Idle, completed: RING_AT + 128 }
    );
    assert_eq!(memory.0[0x200..0x209], [3, 4, 5, 6, 7, 8, 1, 2, 0]);
    assert!(!model.step(1, &mut memory), "there are no more");
    assert_eq!(model.executed_total(), 3);
}

#[test]
fn what_is_not_mapped_halts_with_the_bit_of_the_documents() {
    let outside = 0x10_0000;
    let copy = |from, to, bytes| DescriptorOp::Copy { from, to, bytes };
    for (op, bit) in
        [(copy(outside, 0x100, 8), 0), (copy(0x100, outside, 8), 1), (copy(0x100, 0x200, 0x2000), 11)]
    {
        let (mut model, mut memory) = started(&[op, DescriptorOp::Null]);
        assert!(model.step(9, &mut memory));
        let halted = ChannelStatus { state: ChannelState::Halted, completed: 0 };
        assert_eq!(ChannelStatus::decode(model.read(CHANNEL_STATUS, 8)), halted);
        assert_eq!((completion(&mut memory), model.read(CHANNEL_ERROR, 4)), (halted, 1 << bit));
        assert!(!model.step(9, &mut memory), "it has halted");
        model.write(CHANNEL_ERROR, 4, 1 << bit);
        assert_eq!(model.read(CHANNEL_ERROR, 4), 0, "written bits are cleared");
    }
}

#[test]
fn commands_suspend_and_reset() {
    let (mut model, mut memory) = started(&[DescriptorOp::Null; 3]);
    assert!(model.step(1, &mut memory));
    model.write(CHANNEL_COMMAND, 1, COMMAND_SUSPEND.into());
    assert!(model.step(1, &mut memory));
    assert_eq!((model.state, model.executed_total()), (ChannelState::Suspended, 1));
    model.write(CHANNEL_COMMAND, 1, COMMAND_RESET.into());
    assert_eq!(model.read(CHANNEL_COMMAND, 1), u64::from(COMMAND_RESET));
    assert!(model.step(1, &mut memory));
    assert_eq!((model.read(CHANNEL_COMMAND, 1), model.read(DESCRIPTOR_COUNT, 2)), (0, 0));
    assert_eq!(model.state, ChannelState::Idle);
}

#[test]
fn registers_have_a_width_and_interrupts_are_on_at_first() {
    let mut model = IoatModel::new();
    assert_eq!(model.read(VERSION, 1), 0x33);
    assert_eq!(model.read(VERSION, 4), 0, "not a register of 32 bits");
    assert_eq!(model.read(INTERRUPT_CONTROL, 1), 1);
    model.write(INTERRUPT_CONTROL, 1, 0);
    assert_eq!(model.read(INTERRUPT_CONTROL, 1), 0);
    model.write(registers::VERSION, 1, 7);
    assert_eq!(model.read(VERSION, 1), 0x33);
    model.state = ChannelState::Halted;
    assert_eq!(model.read(CHANNEL_STATUS, 4), 3);
    model.power_on();
    assert_eq!((model.state, model.read(INTERRUPT_CONTROL, 1)), (ChannelState::Idle, 1));
}
