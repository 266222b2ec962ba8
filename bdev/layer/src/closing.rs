//! What a removal leaves behind for a moment: devices that are in use until I/O in flight has completed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::{BlockDevice, Descriptor};

/// How long a removal waits for I/O in flight.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(5);
/// When I/O in flight of an open that ends is [aborted](crate::Bdev::abort_in_flight): later than the three
/// seconds for which targets drain connections.
const ABORT_AFTER: Duration = Duration::from_millis(3500);

/// Devices that are being closed: opens of a target that ends them, or devices that were removed.
///
/// A target makes it of its descriptors before it drops them, and waits without its locks. Then the next user
/// can claim the devices.
#[derive(Debug, Default)]
pub struct Closing(Vec<ClosingDevice>);

#[derive(Debug)]
struct ClosingDevice {
    device: Arc<BlockDevice>,
    /// The open that ends; without, the device was removed, and all of its opens do.
    open: Option<u64>,
}

/// A removal has taken effect, but a device is in use until its I/O in flight has completed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it is removed, but I/O in flight uses the bdev {name} still; others can use it once that has completed"
)]
pub struct StillOpen {
    /// The device.
    pub name: String,
}

impl Closing {
    /// Of the opens of these descriptors, which end with the last of their channels.
    pub fn of<'a>(descriptors: impl IntoIterator<Item = &'a Descriptor>) -> Closing {
        let one = |descriptor: &Descriptor| ClosingDevice {
            device: descriptor.device().clone(),
            open: Some(descriptor.open_number()),
        };
        Closing(descriptors.into_iter().map(one).collect())
    }

    /// Of devices that were unregistered.
    pub fn removed(devices: impl IntoIterator<Item = Arc<BlockDevice>>) -> Closing {
        Closing(devices.into_iter().map(|device| ClosingDevice { device, open: None }).collect())
    }

    /// The end of these and of others.
    #[must_use]
    pub fn and(mut self, others: impl IntoIterator<Item = Closing>) -> Closing {
        self.0.extend(others.into_iter().flat_map(|other| other.0));
        self
    }

    /// Blocks until all are closed, for [`CLOSE_TIMEOUT`] at most. Must not be called on a reactor. I/O that
    /// has not completed after most of this time is aborted where the module can.
    ///
    /// # Errors
    /// The first that is in use still.
    pub fn wait(self) -> Result<(), StillOpen> {
        let end = Instant::now() + CLOSE_TIMEOUT;
        let Err(_) = self.wait_until(end - (CLOSE_TIMEOUT - ABORT_AFTER)) else { return Ok(()) };
        for ClosingDevice { device, open } in &self.0 {
            if let Some(number) = open
                && !device.wait_open_ended(*number, Duration::ZERO)
            {
                device.bdev().abort_in_flight();
            }
        }
        self.wait_until(end)
    }

    /// [`wait`](Self::wait), for `timeout` at most.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for(self, timeout: Duration) -> Result<(), StillOpen> {
        self.wait_until(Instant::now() + timeout)
    }

    fn wait_until(&self, end: Instant) -> Result<(), StillOpen> {
        for ClosingDevice { device, open } in &self.0 {
            let left = end.saturating_duration_since(Instant::now());
            let is_closed = match open {
                Some(number) => device.wait_open_ended(*number, left),
                None => device.wait_closed(left),
            };
            if !is_closed {
                return Err(StillOpen { name: device.name().to_string() });
            }
        }
        Ok(())
    }
}
