//! Registered pages, which have no address: virtual devices pass them on, or say that they do not take them.
#![allow(clippy::unwrap_used)]

mod rig;

use std::sync::{Arc, Mutex};

use bdev::{
    Access, Bdev, BdevError, BdevGeometry, BoxedChannel, Completion, Durability, Request, delay, error,
    passthru, split,
};
use block_io::{Op, Payload, RegisteredPages, Status, Tag};
use rig::Rig;

const ALIGNMENT: u32 = 512;

/// Notes the LBAs of requests with registered pages.
struct PageDisk {
    lbas: Arc<Mutex<Vec<u64>>>,
}

struct PageChannel {
    lbas: Arc<Mutex<Vec<u64>>>,
    done: Vec<Completion>,
}

impl Bdev for PageDisk {
    fn product_name(&self) -> &'static str {
        "Page disk"
    }

    fn geometry(&self) -> BdevGeometry {
        BdevGeometry::new(512, 256)
    }

    fn durability(&self) -> Durability {
        Durability::None
    }

    fn supports(&self, op: Op) -> bool {
        matches!(op, Op::Read | Op::Write)
    }

    fn registered_page_alignment(&self) -> Option<u32> {
        Some(ALIGNMENT)
    }

    fn open(&self, _core: &reactor::Core) -> Result<BoxedChannel, BdevError> {
        Ok(Box::new(PageChannel { lbas: self.lbas.clone(), done: Vec::new() }))
    }
}

impl block_io::Channel for PageChannel {
    type Request = Request;
    type Completion = Completion;

    fn submit(&mut self, batch: &mut Vec<Request>) {
        for request in batch.drain(..) {
            assert!(matches!(request.payload, Payload::Registered(_)), "{request:?}");
            self.lbas.lock().unwrap().push(request.lba);
            self.done.push(request.complete(Status::SUCCESS));
        }
    }

    fn poll(&mut self, sink: &mut Vec<Completion>) -> usize {
        let count = self.done.len();
        sink.append(&mut self.done);
        count
    }

    fn deadline(&self) -> Option<u64> {
        (!self.done.is_empty()).then_some(0)
    }
}

#[test]
fn passthru_delay_and_split_devices_pass_registered_pages_on_and_an_error_device_refuses_them() {
    let mut rig = Rig::new();
    let lbas = Arc::new(Mutex::new(Vec::new()));
    rig.registry.register("Base", None, &[], Arc::new(PageDisk { lbas: lbas.clone() })).unwrap();
    let config = passthru::PassthruConfig { base: "Base".into(), name: "P".into(), uuid: None };
    passthru::create(&rig.registry, config).unwrap();
    delay::create(&rig.registry, delay::DelayConfig::new("P", "D", 1)).unwrap();
    split::create(
        &rig.registry,
        &split::SplitConfig { base: "D".into(), count: 2, part_size: split::PartSize::Even },
    )
    .unwrap();
    error::create(&rig.registry, error::ErrorConfig::new("Dp0")).unwrap();
    let pages = RegisteredPages { index: 7, bytes: 4096 };
    for (name, alignment, expected) in [("Dp1", Some(ALIGNMENT), vec![130, 130]), ("EE_Dp0", None, vec![])] {
        let descriptor = rig.registry.open(name, Access::ReadWrite).unwrap();
        assert_eq!(descriptor.device().bdev().registered_page_alignment(), alignment, "{name}");
        let mut channel = descriptor.channel(&rig.core).unwrap();
        for op in [Op::Read, Op::Write] {
            let request = Request::with_payload(Tag(1), op, 2, 8, Payload::Registered(pages));
            let completion = rig.one(&mut channel, request);
            assert_eq!(completion.status().is_success(), alignment.is_some(), "{name}: {completion:?}");
            let request = completion.into_request();
            assert!(matches!(request.payload, Payload::Registered(of) if of == pages), "{request:?}");
            assert_eq!(request.lba, 2, "as it was submitted");
        }
        assert_eq!(std::mem::take(&mut *lbas.lock().unwrap()), expected, "{name}");
    }
}
