//! A controller that reports shadow doorbells but rejects Doorbell Buffer Config. A test binary of its own, because it
//! inspects the mappings of the process.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use block_io::{Request, Status, Tag};
use nvme::Namespace;
use nvme::testing::SimulatedConfig;
use rig::{attach, buffer, on_device, options, status};
use wire_nvme::identify::oacs;

fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("ringbolt-doorbells")).count()
}

#[test]
fn rejected_shadow_doorbells_stay_mapped_until_the_device_is_dropped() {
    let mut config = SimulatedConfig::new(1024, 512);
    config.identity.oacs |= oacs::DOORBELL_BUFFER;
    config.reject_doorbell_buffer = true;
    on_device(config, async move |core, device| {
        let controller = attach(&core, &device).await;
        assert!(!controller.has_shadow_doorbells());
        // The device may still access their addresses, so that other memory must not take their place.
        assert_eq!(mapped(), 2, "one mapping by the driver, one by the simulated device");
        let mut namespace = Namespace::of(&controller, &core, 1, &options()).await.unwrap();
        let read = Request::read(Tag(0), 0, 1, buffer(&core, 512, 0));
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
    });
    assert_eq!(mapped(), 0, "unmapped with the device");
}
