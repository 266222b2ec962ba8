//! The stacking kit: what a module needs to stand on other bdevs, in this crate or another.
//!
//! A device on one base that passes most of it on is a [`VirtualBdev`], made by [`create_on`]; passthru is
//! the shortest example. Devices that are ranges of one base share it: each is a [`PartBdev`], as those of
//! split and of partition tables; its [`OffsetChannel`] is for other devices too. A device on several bases
//! has a [`BaseSet`], whose places are filled and emptied while it lives, and implements
//! [`Bdev`](crate::Bdev) itself. What the loss, the return or another size of a base means is the module's
//! decision: [`on_base_removed`](crate::Bdev::on_base_removed),
//! [`on_base_returned`](crate::Bdev::on_base_returned) and [`on_base_resized`](crate::Bdev::on_base_resized).
//! [`Registry::stack`](crate::Registry::stack) says what stands on what.
//!
//! On a core, [`BaseChannels`] are the channels of a set's bases, and a [`FanOut`] makes one request into
//! several for them: copies, or pieces of its range. Methods create such devices by
//! [`create_on_bases`](crate::rpc::BdevModule::create_on_bases), also before their bases are there.
//! `examples/mirror` is a module on two bases that uses all of this.

mod base;
mod base_set;
mod fan_out;
mod idle_channels;
mod part;
mod virtual_bdev;

pub use base::BaseBdev;
pub use base_set::{BaseChannels, BaseSet, PLACES_MAX};
pub use fan_out::{FanOut, FanOutResult, Piece};
pub use part::{OffsetChannel, PartBdev, PartKind};
pub use virtual_bdev::{BaseChannel, VirtualBdev, create_on};

pub use crate::range_locks::LockedRange;

/// What becomes of a device when one of its bases has changed: the module's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UpperOutcome {
    /// It stays as it is.
    Stays,
    /// Its geometry may have another number of blocks, which its users get to know.
    Resized,
    /// It is unregistered, and so is what stands on it, unless that decides otherwise.
    Removed,
}
