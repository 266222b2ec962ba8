use super::*;

fn target() -> (UblkTarget, reactor::Reactors) {
    let config = reactor::ReactorConfig { pin: false, ..Default::default() };
    let reactors = reactor::Reactors::start(&config).unwrap();
    (UblkTarget::new(Registry::new(), reactors.handles()), reactors)
}

#[test]
fn disks_need_a_target() {
    let (target, reactors) = target();
    let start = target.start(&UblkDisk::new("M", 0)).unwrap_err();
    assert!(matches!(start, UblkError::NoTarget), "{start}");
    assert!(matches!(target.recover("M", 0), Err(UblkError::NoTarget)));
    assert!(matches!(target.stop(0), Err(UblkError::NotFound(0))));
    assert!(matches!(target.destroy(), Err(UblkError::NoTarget)));
    assert_eq!((target.disks(), target.created_with()), (Vec::new(), None));
    target.shutdown();
    assert!(matches!(target.create(None), Err(UblkError::Stopping)));
    reactors.stop();
}
