//! Tests of a channel with a policy of its own, whose scheduler checks the order in which it is called.

use os::clock::{Clock, VirtualClock};

use super::*;
use crate::{Scheduler, SchedulerContext, SchedulerPolicy, TenantId, Tenants};

/// Tenant 1 first; what is in flight of each tenant, on all channels, is published.
#[derive(Default)]
struct Priority {
    in_flight: Arc<Mutex<std::collections::BTreeMap<TenantId, i64>>>,
}

struct PriorityScheduler {
    tenants: Tenants,
    queued: Vec<Request>,
    in_flight: Arc<Mutex<std::collections::BTreeMap<TenantId, i64>>>,
    exchanged: bool,
}

impl SchedulerPolicy for Priority {
    fn name(&self) -> &'static str {
        "priority"
    }

    fn scheduler(&self, context: &SchedulerContext<'_>) -> Box<dyn Scheduler> {
        assert_eq!((context.core, context.block_size), (0, 512));
        let (tenants, in_flight) = (context.tenants.clone(), self.in_flight.clone());
        Box::new(PriorityScheduler { tenants, queued: Vec::new(), in_flight, exchanged: false })
    }
}

impl Scheduler for PriorityScheduler {
    fn enqueue(&mut self, request: Request, _: &Clock) -> Result<(), Request> {
        if self.queued.len() == 100 {
            return Err(request);
        }
        self.queued.push(request);
        Ok(())
    }

    fn next(&mut self, max: usize, _: &Clock, out: &mut Vec<Request>) {
        assert!(self.exchanged, "exchange comes before next");
        self.queued.sort_by_key(|request| self.tenants.of_flow(request.flow).index() != 1);
        for request in self.queued.drain(..max.min(self.queued.len())) {
            let tenant = self.tenants.of_flow(request.flow);
            *self.in_flight.lock().unwrap().entry(tenant).or_default() += 1;
            out.push(request);
        }
    }

    fn completed(&mut self, completions: &[Completion], _: &Clock) {
        for completion in completions {
            let tenant = self.tenants.of_flow(completion.request().flow);
            *self.in_flight.lock().unwrap().entry(tenant).or_default() -= 1;
        }
    }

    fn exchange(&mut self, _: &Clock) {
        self.exchanged = true;
    }

    fn deadline(&self, _: &Clock) -> Option<u64> {
        (!self.queued.is_empty()).then_some(0)
    }

    fn remove(&mut self, tag: Tag, flow: u16) -> Option<Request> {
        let found = self.queued.iter().position(|request| (request.tag, request.flow) == (tag, flow))?;
        Some(self.queued.remove(found))
    }

    fn drain(&mut self, out: &mut Vec<Request>) {
        out.append(&mut self.queued);
    }
}

/// A harness whose channel has the policy.
fn scheduled(scripted: Scripted) -> (ChannelHarness, Arc<Priority>) {
    let mut harness = ChannelHarness::new(scripted, Access::ReadWrite);
    let policy = Arc::new(Priority::default());
    harness.channel.device().clone().set_scheduler_policy(Some(policy.clone()));
    harness.channel =
        harness.registry.open("dev", Access::ReadWrite).unwrap().channel(&harness.core).unwrap();
    (harness.submitted, harness.completed) = (SUBMITTED.take().unwrap(), COMPLETED.take().unwrap());
    (harness, policy)
}

impl Priority {
    fn of(&self, flow: &crate::Flow) -> i64 {
        self.in_flight.lock().unwrap().get(&flow.tenant()).copied().unwrap_or(0)
    }
}

#[test]
fn a_policy_decides_about_each_request_by_its_tenant() {
    let (mut harness, policy) = scheduled(Scripted::new(4));
    let tenants = harness.registry.tenants().clone();
    let (first, second) = (tenants.connect("first"), tenants.connect("second"));
    assert_eq!(first.tenant().index(), 1);
    let of_second = (0..8).map(|tag| harness.read(tag, second.id()));
    let mut batch: Vec<Request> = of_second.collect();
    batch.extend((8..12).map(|tag| harness.read(tag, first.id())));
    harness.channel.submit(&mut batch);
    assert!(batch.is_empty());
    assert_eq!((policy.of(&first), policy.of(&second)), (4, 0));
    let mut tags = Vec::new();
    while tags.len() < 12 {
        harness.complete(2);
        tags.extend(harness.poll().into_iter().map(|completion| completion.tag().0));
        assert_eq!(harness.channel.outstanding(), 12 - tags.len());
    }
    assert_eq!(tags, [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!((policy.of(&first), policy.of(&second)), (0, 0));
    // Nothing is queued, and still no request goes past it.
    harness.channel.submit(&mut vec![harness.read(20, second.id())]);
    assert_eq!(policy.of(&second), 1);
    harness.complete(1);
    harness.poll();
    assert_eq!(policy.of(&second), 0);
}

#[test]
fn each_request_that_a_scheduler_lets_go_ends_once_for_it_too() {
    let scripted = Scripted { room: 2, ..Scripted::new(8) };
    let (mut harness, policy) = scheduled(scripted);
    let flow = harness.registry.tenants().connect("one");
    // Two are in the module, six are selected, four are queued.
    harness.channel.submit(&mut (0..12).map(|tag| harness.read(tag, flow.id())).collect());
    assert_eq!((policy.of(&flow), harness.submitted.borrow().len()), (8, 2));
    let abort = |tag, target| Request { flow: flow.id(), ..Request::abort(Tag(tag), Tag(target)) };
    harness.channel.submit(&mut vec![abort(100, 5), abort(101, 11)]);
    assert_eq!(policy.of(&flow), 8, "the place of the selected one is the next one's");
    let invalid = Request { flow: flow.id(), ..Request::new(Tag(102), Op::Unmap, 0, 1) };
    let reset = Request { flow: flow.id(), ..Request::new(Tag(103), Op::Reset, 0, 0) };
    harness.channel.submit(&mut vec![invalid, reset]);
    let mut ends = harness.poll().len();
    harness.registry.unregister("dev").unwrap();
    harness.complete(usize::MAX);
    while harness.channel.outstanding() > 0 {
        ends += harness.poll().len();
    }
    assert_eq!((ends, policy.of(&flow)), (16, 0));
}

#[test]
fn rate_limits_are_in_force_with_any_policy() {
    let (mut harness, policy) = scheduled(Scripted::new(64));
    let flow = harness.registry.tenants().connect("one");
    let limits = crate::RateLimits { rw_ios: 10, ..Default::default() };
    harness.channel.device().set_rate_limits(limits);
    harness.channel.submit(&mut (0..8).map(|tag| harness.read(tag, flow.id())).collect());
    let started = harness.submitted.borrow().len();
    assert!((1..8).contains(&started), "{started}");
    assert!(harness.channel.deadline().is_some());
    harness.channel.device().set_rate_limits(crate::RateLimits::default());
    harness.poll();
    assert_eq!((harness.submitted.borrow().len(), policy.of(&flow)), (8, 8));
}

#[test]
fn a_limited_queue_is_due_when_its_tokens_are() {
    let harness = ChannelHarness::new(Scripted::new(64), Access::ReadWrite);
    let device = harness.channel.device().clone();
    let time = VirtualClock::default();
    let clock = Clock::from(time.clone());
    device.set_rate_limits(crate::RateLimits { rw_ios: 1000, ..Default::default() });
    let (mut scheduler, _) = device.scheduler(0);
    assert_eq!(scheduler.deadline(&clock), None);
    time.advance_to(3_600_000_000_000);
    for tag in 0..30 {
        scheduler.enqueue(harness.read(tag, 0), &clock).unwrap();
    }
    assert_eq!(scheduler.deadline(&clock), Some(0));
    let mut out = Vec::new();
    scheduler.next(30, &clock, &mut out);
    // What is lent for idle time, ten milliseconds' worth, and the next.
    assert_eq!(out.len(), 11);
    let due = scheduler.deadline(&clock).unwrap();
    assert!(due > clock.now_ns() && due <= clock.now_ns() + 1_000_000, "{due}");
    time.advance_to(due);
    scheduler.next(30, &clock, &mut out);
    assert_eq!(out.len(), 12);
}
