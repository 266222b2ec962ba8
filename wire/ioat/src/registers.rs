//! Offsets and values of registers, from the start of BAR 0.
//!
//! A function has one channel from version 3.0 on, whose registers follow those of the function.

/// Number of channels: 8 bits.
pub const CHANNEL_COUNT: u32 = 0x00;
/// Binary logarithm of the most bytes of a descriptor, in its lower 5 bits: 8 bits. 0 is 4 GiB, less than 12
/// is invalid.
pub const TRANSFER_CAPACITY: u32 = 0x01;
/// Interrupts of the function: 8 bits.
pub const INTERRUPT_CONTROL: u32 = 0x03;
/// Major version in the upper 4 bits, minor one in the lower: 8 bits.
pub const VERSION: u32 = 0x08;
/// What the engine can: 32 bits.
pub const CAPABILITIES: u32 = 0x10;
/// Control of the channel: 16 bits.
pub const CHANNEL_CONTROL: u32 = 0x80;
/// Commands to the channel: 8 bits.
pub const CHANNEL_COMMAND: u32 = 0x84;
/// Descriptors that the channel was given since its reset, modulo 2^16: 16 bits.
pub const DESCRIPTOR_COUNT: u32 = 0x86;
/// Status of the channel: 64 bits, as [`ChannelStatus`](crate::ChannelStatus).
pub const CHANNEL_STATUS: u32 = 0x88;
/// Address of the first descriptor, a multiple of 64: 64 bits.
pub const CHAIN_ADDRESS: u32 = 0x90;
/// Address that the channel writes its status to, a multiple of 8: 64 bits.
pub const COMPLETION_ADDRESS: u32 = 0x98;
/// [`ChannelErrors`](crate::ChannelErrors): 32 bits, each cleared by writing it.
pub const CHANNEL_ERROR: u32 = 0xa8;

/// Bytes of registers that are used.
pub const REGISTERS_BYTES: u32 = 0xb0;

/// The least version that is understood: 3.0.
pub const VERSION_MIN: u8 = 0x30;
/// The highest: versions of another major number have another layout.
pub const VERSION_MAX: u8 = 0x3f;

/// Of [`CAPABILITIES`]: fills.
pub const CAPABILITY_FILL: u32 = 1 << 6;

/// Of [`CHANNEL_CONTROL`]: the channel halts with any error.
pub const CONTROL_ABORT_ON_ERROR: u16 = 1 << 3;
/// Of [`CHANNEL_CONTROL`]: it writes its status when it halts.
pub const CONTROL_REPORT_ERROR: u16 = 1 << 2;

/// Of [`CHANNEL_COMMAND`]: ends the descriptor that is being executed, and starts none.
pub const COMMAND_SUSPEND: u8 = 1 << 2;
/// Of [`CHANNEL_COMMAND`]: resets the channel; reads as set until that is done.
pub const COMMAND_RESET: u8 = 1 << 5;
