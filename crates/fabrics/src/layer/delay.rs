//! Adds a network's distance to any fabric: what would this be worth, were the node so far away?
//!
//! Invariant: a request runs no earlier than a round trip after it was asked for, and those that are under way at once
//! share that time. Invariant: nothing lies between an answer and whoever waits for it. What a chain made unreachable
//! must be retired before the fabric underneath ends its turn, or a node that looks for lost buffers takes it for one.
//! So all of a round trip is travelled before the chain runs, and what is retired goes at once: it costs nobody a wait.
//! Two chains of one task are as far apart as they would be.

use super::Draw;
use crate::executor::{Idle, Turns};
use crate::spin::BREATH;
use crate::timer;
use farside_remote::clock::Clock;
use farside_remote::fabric::ServiceId;
use farside_remote::{Addr, Chain, Fabric, FabricError, Key, NodeId, Reply};
use std::cell::{Cell, RefCell};
use std::task::Poll;
use std::time::Duration;

/// How far away the node is to be.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Distance {
    /// How long anything travels one way.
    pub one_way: Duration,
    /// How much longer a round trip may take: up to so much, by chance.
    pub jitter: Duration,
    /// Bytes that each direction carries in a second; any number if absent.
    pub bytes_per_s: Option<u64>,
    /// What chance is drawn from.
    pub seed: u64,
}

/// The last stretch is waited for by looking at the clock: being woken takes longer than many a distance.
const SPIN: Duration = Duration::from_micros(100);

/// A fabric that is farther away. Belongs to one thread.
pub struct Delay<F> {
    inner: F,
    distance: Distance,
    state: RefCell<State>,
    breathes_at: Cell<Duration>,
}

struct State {
    draw: Draw,
    /// From when on each direction has nothing more to carry.
    out_free: Duration,
    back_free: Duration,
    /// Bytes of answers: how long those were is known only once they are here, so those after them wait.
    came: usize,
}

impl<F> Delay<F> {
    /// Puts so much distance between the caller and `inner`.
    pub fn new(inner: F, distance: Distance) -> Delay<F> {
        let (out_free, back_free) = (Duration::ZERO, Duration::ZERO);
        let state = RefCell::new(State { draw: Draw(distance.seed), out_free, back_free, came: 0 });
        Delay { inner, distance, state, breathes_at: Cell::new(Duration::ZERO) }
    }

    /// The fabric underneath.
    pub fn inner(&self) -> &F {
        &self.inner
    }

    /// When a request of so many bytes that is asked now may run.
    fn runs_at(&self, now: Duration, bytes: usize) -> Duration {
        let State { draw, out_free, back_free, came } = &mut *self.state.borrow_mut();
        let Distance { one_way, jitter, bytes_per_s, .. } = self.distance;
        let mut at = now + 2 * one_way;
        if let Some(rate) = bytes_per_s {
            let takes = |bytes: usize| Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
            *out_free = now.max(*out_free) + takes(bytes);
            *back_free = (*out_free + 2 * one_way).max(*back_free) + takes(std::mem::take(came));
            at = *back_free;
        }
        at + draw.up_to(jitter)
    }

    /// Waits until then: by the timer while that is far, then by the clock.
    async fn until(&self, at: Duration) {
        let far = at.saturating_sub(timer::now()).saturating_sub(SPIN);
        if !far.is_zero() {
            timer::sleep(far).await;
        }
        std::future::poll_fn(|cx| {
            let now = timer::now();
            if now >= at {
                return Poll::Ready(());
            }
            if now >= self.breathes_at.get() {
                // Who is to answer others may need this very core.
                std::thread::yield_now();
                self.breathes_at.set(now + BREATH);
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await
    }

    async fn travel(&self, bytes: usize) {
        let at = self.runs_at(timer::now(), bytes);
        self.until(at).await;
    }

    fn came(&self, bytes: usize) {
        self.state.borrow_mut().came += bytes;
    }
}

impl<F: Fabric> Fabric for Delay<F> {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.travel(chain.view().wire_len()).await;
        self.inner.run(node, chain, reply).await?;
        self.came(reply.as_bytes().len());
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        self.travel(request.len()).await;
        self.inner.call(node, service, request, answer).await?;
        self.came(answer.len());
        Ok(())
    }

    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        self.inner.retire(node, key, buffer);
    }
}

impl<F: Turns> Turns for Delay<F> {
    fn end_turn(&self) {
        self.inner.end_turn();
    }

    fn wait(&self, core: &Idle<'_>) {
        self.inner.wait(core);
    }
}

impl<F: Clock> Clock for Delay<F> {
    fn now(&self) -> Duration {
        self.inner.now()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.inner.sleep(duration)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::{Core, block_on};
    use crate::layer::count::{Costs, Count};
    use crate::layer::trace::Trace;
    use farside_remote::{ChainBuf, read};
    use std::rc::Rc;

    const US: Duration = Duration::from_micros(1);

    /// Answers at once, and remembers when.
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
    }

    impl Turns for Near {
        fn end_turn(&self) {}
    }

    impl Clock for Near {
        fn now(&self) -> Duration {
            timer::now()
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
        fabric.run(NODE, &chain, &mut reply).await.expect("it answers");
    }

    fn far(distance: Distance) -> Delay<Near> {
        Delay::new(Near::default(), distance)
    }

    #[test]
    fn nothing_runs_before_a_round_trip_however_many_are_under_way() {
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
        assert!(ran.iter().all(|&at| at >= since + 2 * one_way), "none before a round trip");
        assert!(ran[TASKS as usize..].iter().all(|&at| at >= since + 4 * one_way), "the second after two");
    }

    #[test]
    fn it_goes_under_the_other_layers_and_what_is_retired_goes_at_once() {
        let one_way = 300 * US;
        let told = RefCell::new(Vec::new());
        let near = Rc::new(far(Distance { one_way, jitter: 50 * US, seed: 3, ..Distance::default() }));
        let counted =
            Count::new(Trace::new(Rc::clone(&near), |text: &str| told.borrow_mut().push(text.to_owned())));
        let since = timer::now();
        counted.retire(NODE, Key::new(1, 1), Addr::new(64));
        assert_eq!(near.inner.0.borrow().len(), 1);
        let mut answer = vec![1];
        block_on(&counted, async {
            ask(&counted).await;
            counted.call(NODE, ServiceId(1), b"?", &mut answer).await.expect("it answers");
        });
        assert!(near.inner.0.borrow()[2] >= since + 4 * one_way);
        let costs = counted.take();
        assert_eq!(costs, Costs { round_trips: 2, requests: 1, calls: 1, retired: 1, ..costs });
        assert_eq!(told.borrow().len(), 3);
    }

    #[test]
    fn a_line_carries_so_many_bytes_and_no_more() {
        let one_way = 10 * US;
        let line = far(Distance { one_way, bytes_per_s: Some(1_000_000), ..Distance::default() });
        // A byte takes a microsecond.
        assert_eq!(line.runs_at(1000 * US, 100), 1120 * US);
        assert_eq!(line.runs_at(1000 * US, 100), 1220 * US, "it waits for the one before");
        line.came(500);
        assert_eq!(line.runs_at(1000 * US, 100), 1820 * US, "so does its answer");
        assert_eq!(line.runs_at(5000 * US, 100), 5120 * US, "what is long past makes nobody wait");
        let wide = far(Distance { one_way, ..Distance::default() });
        wide.came(1 << 30);
        let at_once = [1 << 30, 1, 1].map(|bytes| wide.runs_at(US, bytes));
        assert_eq!(at_once, [21 * US; 3], "without a limit all travel at once");
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
