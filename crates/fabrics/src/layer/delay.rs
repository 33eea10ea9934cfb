//! Adds network latency to any fabric, to show how a protocol performs if the node is far away.
//!
//! Invariant: every round trip takes longer by the configured latency. Concurrent round trips wait at the same time.
//!
//! - If an engine runs the chains ([`Delay::of_answers`]), a response that has arrived is read only at its delayed
//!   time. In the same round of the core ([`crate::executor`]), the requests that follow from this response are sent,
//!   as they would be without latency.
//! - If the caller's CPU runs the chains ([`Delay::of_requests`]), the whole round trip passes before the chain runs.
//!   So two successive chains of one task are as far apart in time as they would be over a network.
//! - A retire is passed on at once, since no caller waits for it.
//!
//! Invariant: a request whose future is dropped during the added latency never runs.
//! Invariant: requests sent, or responses read, in one round of the core travel together, unless jitter or limited
//! bandwidth separates them. If each had its own delay, a batch would fall apart into datagrams of one request each,
//! which real latency does not cause.

use crate::executor::{in_company, is_alone, turn, yield_now};
use crate::spin::YIELD_INTERVAL;
use crate::timer;
use farside_remote::draws::Draws;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Capabilities, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::time::Duration;

/// The simulated distance to the node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// Latency in one direction.
    pub one_way: Duration,
    /// Maximum random addition to the time of a round trip.
    pub jitter: Duration,
    /// Bandwidth of each direction in bytes per second; unlimited if absent.
    pub bytes_per_s: Option<u64>,
    /// Seed of the jitter.
    pub seed: u64,
}

/// Length of the final part of a wait, in which the thread polls the clock. It does not sleep then, because a wake-up
/// takes longer than many simulated distances.
const SPIN: Duration = Duration::from_micros(100);
/// Length of the last part of [`SPIN`], in which a core without another task begins no new round between reads of the
/// clock. In each round an endpoint makes a system call to receive datagrams, and that alone takes as long as a round
/// trip within a rack.
const SPIN_ALONE: Duration = Duration::from_micros(5);

/// A fabric with added latency. Belongs to one thread.
pub struct Delay<F> {
    inner: F,
    distance: Distance,
    held: Held,
    state: RefCell<State>,
    yields_at: Cell<Duration>,
    /// Number of the core's last round in which the time was read, and that time.
    turn: Cell<(u64, Duration)>,
}

/// The part of a round trip that is delayed: the request or the response.
#[derive(Clone, Copy)]
enum Held {
    Request,
    Answer,
}

struct State {
    draws: Draws,
    /// Time until which each direction is busy: requests (`out_free`) and responses (`back_free`).
    out_free: Duration,
    back_free: Duration,
    /// Total size of responses not yet charged to the bandwidth. A response's size is known only on arrival, so it
    /// delays the next request instead.
    response_bytes: usize,
}

impl<F> Delay<F> {
    /// Adds `distance` to `inner`, whose chains the caller's own CPU runs. Works with any fabric.
    pub fn of_requests(inner: F, distance: Distance) -> Delay<F> {
        Delay::new(inner, distance, Held::Request)
    }

    /// Adds `distance` to `inner`, which must wake a caller only once, when the response is there. A task must have at
    /// most one request outstanding, since a wake-up does not say which response it is for.
    pub fn of_answers(inner: F, distance: Distance) -> Delay<F> {
        Delay::new(inner, distance, Held::Answer)
    }

    fn new(inner: F, distance: Distance, held: Held) -> Delay<F> {
        let (out_free, back_free) = (Duration::ZERO, Duration::ZERO);
        let state =
            RefCell::new(State { draws: Draws(distance.seed), out_free, back_free, response_bytes: 0 });
        let (yields_at, turn) = (Cell::new(Duration::ZERO), Cell::new((u64::MAX, Duration::ZERO)));
        Delay { inner, distance, held, state, yields_at, turn }
    }

    /// Returns the wrapped fabric.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// Returns the current time. A core with several tasks gets one time per round, that of the first call.
    fn now(&self) -> Duration {
        match turn() {
            Some(turn) if !is_alone() => {
                if self.turn.get().0 != turn {
                    self.turn.set((turn, timer::now()));
                }
                self.turn.get().1
            }
            _ => timer::now(),
        }
    }

    /// Returns the time at which a request of `bytes` bytes that is sent at `now` may run.
    fn runs_at(&self, now: Duration, bytes: usize) -> Duration {
        let State { draws, out_free, back_free, response_bytes } = &mut *self.state.borrow_mut();
        let Distance { one_way, jitter, bytes_per_s, .. } = self.distance;
        let mut at = now + 2 * one_way;
        if let Some(rate) = bytes_per_s {
            let takes = |bytes: usize| Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
            *out_free = now.max(*out_free) + takes(bytes);
            *back_free = (*out_free + 2 * one_way).max(*back_free) + takes(std::mem::take(response_bytes));
            at = *back_free;
        }
        at + jitter.mul_f64(draws.share())
    }

    /// Waits until `at`: first with the timer, then, in the last part, by polling the clock.
    async fn until(&self, at: Duration) {
        let far = at.saturating_sub(timer::now()).saturating_sub(SPIN);
        if !far.is_zero() {
            timer::sleep(far).await;
        }
        let spins_since = timer::now();
        poll_fn(|cx| {
            loop {
                let now = self.now();
                if now >= at {
                    return Poll::Ready(());
                }
                if now >= self.yields_at.get().max(spins_since + YIELD_INTERVAL) {
                    // A thread that must respond to others may need this core.
                    std::thread::yield_now();
                    self.yields_at.set(now + YIELD_INTERVAL);
                }
                if at - now > SPIN_ALONE || !is_alone() {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                std::hint::spin_loop();
            }
        })
        .await
    }

    /// Awaits `asked`, and adds the time that a round trip of `bytes` bytes takes.
    async fn travel<O>(&self, bytes: usize, asked: impl Future<Output = O>) -> O {
        if self.distance == (Distance { seed: self.distance.seed, ..Distance::default() }) {
            return asked.await;
        }
        let mut asked = pin!(asked);
        match self.held {
            Held::Request => {
                if in_company() {
                    // The request leaves when the round ends, as without latency.
                    yield_now().await;
                }
                self.until(self.runs_at(self.now(), bytes)).await;
                asked.await
            }
            Held::Answer => loop {
                if let Poll::Ready(answer) = poll_fn(|cx| Poll::Ready(asked.as_mut().poll(cx))).await {
                    return answer;
                }
                woken().await;
                self.until(self.runs_at(self.now(), bytes)).await;
            },
        }
    }

    fn response_bytes(&self, bytes: usize) {
        self.state.borrow_mut().response_bytes += bytes;
    }
}

/// Completes when its task is polled again, which happens when another future of the same task wakes the task.
async fn woken() {
    let mut is_first = true;
    poll_fn(|_| if std::mem::replace(&mut is_first, false) { Poll::Pending } else { Poll::Ready(()) }).await;
}

impl<F: Fabric> Fabric for Delay<F> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        let bytes = chain.view().wire_len();
        self.travel(bytes, self.inner.run(node, chain, &mut *reply)).await?;
        self.response_bytes(reply.as_bytes().len());
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.travel(request.len(), self.inner.call(node, service, request, &mut *answer)).await?;
        self.response_bytes(answer.len());
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }

    fn capabilities(&self, node: NodeId) -> Capabilities {
        self.inner.capabilities(node)
    }

    fn session_number(&self, node: NodeId) -> u64 {
        self.inner.session_number(node)
    }

    fn may_run_abandoned(&self, node: NodeId) -> bool {
        self.inner.may_run_abandoned(node)
    }
}

turns_and_time_of_inner!(Delay<F>);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Core, Turns, block_on};
    use crate::layer::count::{Costs, Count};
    use crate::layer::trace::Trace;
    use farside_remote::clock::Clock;
    use farside_remote::{ChainBuf, read};
    use std::rc::Rc;

    const US: Duration = Duration::from_micros(1);

    /// A fabric that responds at once, and records the time of each request.
    #[derive(Default)]
    struct Near(RefCell<Vec<Duration>>);

    impl Fabric for Near {
        async fn run(
            &self,
            _node: NodeId,
            _chain: &Chain<'_>,
            _reply: &mut Reply,
        ) -> Result<(), FabricError> {
            self.0.borrow_mut().push(timer::now());
            Ok(())
        }
        async fn call(
            &self,
            _node: NodeId,
            _service: ServiceId,
            _request: &[u8],
            answer: &mut Vec<u8>,
        ) -> Result<(), FabricError> {
            self.0.borrow_mut().push(timer::now());
            answer.clear();
            Ok(())
        }
        fn retire(&self, _node: NodeId, _key: Key, _buffer: Addr) {
            self.0.borrow_mut().push(timer::now());
        }

        fn capabilities(&self, _node: NodeId) -> Capabilities {
            Capabilities::SOFTWARE
        }
    }

    impl Turns for Near {
        fn end_turn(&self) {}
    }

    impl Clock for Near {
        fn now(&self) -> Duration {
            timer::now()
        }
        fn wall(&self) -> Duration {
            timer::wall()
        }

        fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
            timer::sleep(duration)
        }
    }

    const NODE: NodeId = NodeId(0);

    async fn ask(fabric: &impl Fabric) {
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(Key::new(1, 1));
        chain.also(read(Addr::new(0), 8));
        fabric.run(NODE, &chain, &mut reply).await.expect("the fabric responds");
    }

    fn far(distance: Distance) -> Delay<Near> {
        Delay::of_requests(Near::default(), distance)
    }

    #[test]
    fn no_request_runs_before_a_round_trip_has_passed() {
        const TASKS: u32 = 32;
        let one_way = 20_000 * US;
        let fabric = far(Distance { one_way, ..Distance::default() });
        let since = timer::now();
        let mut core = Core::new(&fabric);
        for _ in 0..TASKS {
            core.spawn(async {
                ask(&fabric).await;
                ask(&fabric).await;
            });
        }
        core.run();
        drop(core);
        let ran = fabric.inner.0.borrow();
        assert_eq!(ran.len(), 2 * TASKS as usize);
        assert!(ran.iter().all(|&at| at >= since + 2 * one_way), "no request runs before one round trip");
        assert!(
            ran[TASKS as usize..].iter().all(|&at| at >= since + 4 * one_way),
            "the second runs after two round trips"
        );
    }

    #[test]
    fn requests_of_one_turn_run_in_one_turn() {
        const TASKS: usize = 16;
        let fabric = far(Distance { one_way: 3 * US, ..Distance::default() });
        let ran = RefCell::new(Vec::new());
        let mut core = Core::new(&fabric);
        for task in 0..TASKS {
            let (fabric, ran) = (&fabric, &ran);
            core.spawn(async move {
                for _ in 0..100 {
                    let asked = timer::now();
                    // About the time to build a request or to read a response.
                    while timer::now() < asked + US {}
                    ask(fabric).await;
                    ran.borrow_mut().push((turn().expect("a core runs"), task));
                }
            });
        }
        core.run();
        drop(core);
        let ran = ran.into_inner();
        assert_eq!(ran.len(), 100 * TASKS);
        for batch in ran.chunks(TASKS) {
            assert!(batch.iter().map(|(_, task)| *task).eq(0..TASKS), "each task once: {batch:?}");
            assert!(batch.iter().all(|(turn, _)| *turn == batch[0].0), "in one turn: {batch:?}");
        }
    }

    #[test]
    fn delay_works_under_other_layers_and_passes_retires_at_once() {
        let one_way = 300 * US;
        let reported = RefCell::new(Vec::new());
        let near = Rc::new(far(Distance { one_way, jitter: 50 * US, seed: 3, ..Distance::default() }));
        let counted = Count::new(Trace::new(Rc::clone(&near), |text: &str| {
            reported.borrow_mut().push(text.to_owned())
        }));
        let since = timer::now();
        counted.retire(NODE, Key::new(1, 1), Addr::new(64));
        assert_eq!(near.inner.0.borrow().len(), 1);
        let mut answer = vec![1];
        block_on(&counted, async {
            ask(&counted).await;
            counted.call(NODE, ServiceId(1), b"?", &mut answer).await.expect("the fabric responds");
        });
        assert!(near.inner.0.borrow()[2] >= since + 4 * one_way);
        let costs = counted.take();
        assert_eq!(costs, Costs { round_trips: 2, requests: 1, calls: 1, retired: 1, ..costs });
        assert_eq!(reported.borrow().len(), 3);
    }

    #[test]
    fn a_request_dropped_on_its_way_never_runs_and_all_others_do() {
        const TASKS: usize = 32;
        let fabric = far(Distance { one_way: 10_000 * US, ..Distance::default() });
        let dropped = Cell::new(0);
        let mut core = Core::new(&fabric);
        for task in 0..TASKS {
            let (fabric, dropped) = (&fabric, &dropped);
            core.spawn(async move {
                let mut asked = std::pin::pin!(ask(fabric));
                if task % 2 == 0 {
                    return asked.await;
                }
                let polled = poll_fn(|cx| Poll::Ready(asked.as_mut().poll(cx))).await;
                dropped.set(dropped.get() + usize::from(polled.is_pending()));
            });
        }
        core.run();
        drop(core);
        assert!(dropped.get() > 0, "a request travels for longer than it takes to send");
        assert_eq!(fabric.inner.0.borrow().len(), TASKS - dropped.get());
    }

    /// A fabric that responds after 2 ms, and records the core's rounds in which requests were sent.
    #[derive(Default)]
    struct Engine {
        asked_in: RefCell<Vec<u64>>,
        answered: Cell<u32>,
    }

    impl Fabric for Engine {
        async fn run(
            &self,
            _node: NodeId,
            _chain: &Chain<'_>,
            _reply: &mut Reply,
        ) -> Result<(), FabricError> {
            self.asked_in.borrow_mut().push(turn().expect("a core runs"));
            timer::sleep(Duration::from_millis(2)).await;
            self.answered.set(self.answered.get() + 1);
            Ok(())
        }
        async fn call(
            &self,
            _node: NodeId,
            _service: ServiceId,
            _request: &[u8],
            _answer: &mut Vec<u8>,
        ) -> Result<(), FabricError> {
            unreachable!("this test makes no calls")
        }
        fn retire(&self, _node: NodeId, _key: Key, _buffer: Addr) {}

        fn capabilities(&self, _node: NodeId) -> Capabilities {
            Capabilities::SOFTWARE
        }
    }

    impl Turns for Engine {
        fn end_turn(&self) {}
    }

    #[test]
    fn a_response_is_read_in_the_turn_that_sends_the_next_request() {
        let one_way = 500 * US;
        let far = Delay::of_answers(Engine::default(), Distance { one_way, ..Distance::default() });
        let since = timer::now();
        let mut core = Core::new(&far);
        for _ in 0..8 {
            core.spawn(async {
                let began = turn();
                ask(&far).await;
                assert!(
                    timer::now() >= since + Duration::from_millis(2) + 2 * one_way,
                    "the response is delayed"
                );
                assert_ne!(turn(), began);
                let answered_in = turn().expect("a core runs");
                let mut next = pin!(ask(&far));
                let polled = poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx))).await;
                assert!(polled.is_pending(), "it is dropped before the response");
                assert_eq!(
                    far.inner.asked_in.borrow().last(),
                    Some(&answered_in),
                    "it was sent in the same turn"
                );
            });
        }
        core.run();
        drop(core);
        assert_eq!(far.inner.asked_in.borrow().len(), 16);
        assert_eq!(far.inner.answered.get(), 8, "the other requests were dropped");
    }

    /// Tests requests without jitter, which could change the order.
    #[test]
    fn a_later_request_does_not_arrive_earlier() {
        for bytes_per_s in [None, Some(1_000_000_000)] {
            let line = far(Distance { one_way: 300 * US, bytes_per_s, ..Distance::default() });
            let times: Vec<_> =
                (0..100).map(|ask| line.runs_at(ask * US, 1 + ask as usize % 7 * 100)).collect();
            assert!(times.is_sorted(), "{times:?}");
        }
    }

    #[test]
    fn a_line_does_not_exceed_its_bandwidth() {
        let one_way = 10 * US;
        let line = far(Distance { one_way, bytes_per_s: Some(1_000_000), ..Distance::default() });
        // A byte takes a microsecond.
        assert_eq!(line.runs_at(1000 * US, 100), 1120 * US);
        assert_eq!(line.runs_at(1000 * US, 100), 1220 * US, "a request waits for the one before it");
        line.response_bytes(500);
        assert_eq!(line.runs_at(1000 * US, 100), 1820 * US, "a request waits for earlier responses");
        assert_eq!(line.runs_at(5000 * US, 100), 5120 * US, "earlier traffic delays nothing later");
        let wide = far(Distance { one_way, ..Distance::default() });
        wide.response_bytes(1 << 30);
        let at_once = [1 << 30, 1, 1].map(|bytes| wide.runs_at(US, bytes));
        assert_eq!(at_once, [21 * US; 3], "without a limit no request waits");
    }

    #[test]
    fn the_same_seed_gives_the_same_jitter() {
        let draws = |seed| {
            let line = far(Distance { jitter: 100 * US, seed, ..Distance::default() });
            (0..100).map(|_| line.runs_at(US, 1)).collect::<Vec<_>>()
        };
        assert_eq!(draws(1), draws(1));
        assert_ne!(draws(1), draws(2));
        assert!(draws(1).iter().all(|&at| (US..=101 * US).contains(&at)));
    }
}
