//! A controller that offers shadow doorbells and then does not take them. Alone in its process: it looks at what is
//! mapped.
#![allow(clippy::unwrap_used, missing_docs)]

mod rig;

use nvme::Namespace;
use nvme::simulated::Config;
use rig::{attach, buffer, on_device, options, status};
use ring::{Request, Status, Tag};
use wire_nvme::identify::oacs;

fn mapped() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().filter(|line| line.contains("ringbolt-doorbells")).count()
}

#[test]
fn pages_that_a_device_was_shown_stay_where_they_are_until_it_is_let_go() {
    let mut config = Config::new(1024, 512);
    config.identity.oacs |= oacs::DOORBELL_BUFFER;
    config.refuses_shadow = true;
    on_device(config, async move |core, device| {
        let controller = attach(&core, &device).await;
        assert!(!controller.has_shadow_doorbells());
        // Other memory in their place would be memory that the device knows, and knows wrongly.
        assert_eq!(mapped(), 2, "by the driver, and by what stands for the device");
        let mut namespace = Namespace::of(&controller, &core, 1, &options()).await.unwrap();
        let read = Request::read(Tag(0), 0, 1, buffer(&core, 512, 0));
        assert_eq!(status(&core, &mut namespace, read).await, Status::SUCCESS);
    });
    assert_eq!(mapped(), 0, "they stay for nobody");
}
