//! The executor: one thread, one seed, virtual nanoseconds. All code runs in tasks, and time advances only when no task
//! can run.
//!
//! A task belongs to a *process*, which can be stopped, resumed and killed between any two of its awaits. Everything
//! that takes time is an await: a task awaits between two accesses to memory, and between two messages.
//!
//! Invariant: the order in which tasks run depends on the seed alone.
//!
//! Invariant: when a process is killed, its tasks are dropped before anything else runs, and never run again.

use crate::random::Random;
use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// Virtual time since the start of the world, in nanoseconds.
pub type Nanos = u64;

/// Number of nanoseconds in a microsecond.
pub const MICROS: Nanos = 1_000;
/// Number of nanoseconds in a millisecond.
pub const MILLIS: Nanos = 1_000_000;
/// Number of nanoseconds in a second.
pub const SECONDS: Nanos = 1_000_000_000;

/// Identifier of a process. Identifiers are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ProcessId(pub u32);

/// Handle to a world. Clones refer to the same world.
#[derive(Clone)]
pub struct World(Rc<Inner>);

struct Inner {
    random: Random,
    now: Cell<Nanos>,
    /// Number of events that have happened so far.
    events: Cell<u64>,
    agenda: RefCell<Agenda>,
    tasks: RefCell<Vec<Slot>>,
    free: RefCell<Vec<u32>>,
    processes: RefCell<Vec<Process>>,
    ready: Arc<Ready>,
    /// The index of the slot of the task being polled (if any), and the task's process.
    current: Cell<Option<(u32, ProcessId)>>,
}

/// Queue of the events that are planned for a later time.
#[derive(Default)]
struct Agenda {
    queue: BinaryHeap<Reverse<Event>>,
    /// Number of events that were ever planned.
    planned: u64,
    /// Plans of the queued events. An event holds its *place*, the index of its plan here. Places are reused.
    plans: Vec<Option<Plan>>,
    free: Vec<u32>,
}

/// Time and place of a planned event. The plan itself is in `Agenda::plans`, so that the entries which the queue moves
/// stay small.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Nanos,
    /// The event's number in the upper bits, and the place of its plan in the lower bits. Of two events at the same
    /// instant, the event that was planned first happens first.
    number_and_place: u64,
}

/// Number of bits of an event's place. The remaining bits hold the event's number.
const PLACE_BITS: u32 = 24;
const NUMBER_BITS: u32 = u64::BITS - PLACE_BITS;

/// What happens at a planned event.
enum Plan {
    /// Resumes a task. Nearly all events are of this kind, which needs no waker.
    Resume(TaskName),
    Wake(Waker),
    Run(Box<dyn FnOnce()>),
}

impl Agenda {
    fn add(&mut self, at: Nanos, plan: Plan) {
        let place = match self.free.pop() {
            Some(place) => {
                self.plans[place as usize] = Some(plan);
                place
            }
            None => {
                assert!(
                    self.plans.len() < 1 << PLACE_BITS,
                    "at most 2^24 events can be planned at the same time"
                );
                self.plans.push(Some(plan));
                self.plans.len() as u32 - 1
            }
        };
        assert!(self.planned < 1 << NUMBER_BITS, "a world can have at most 2^40 events");
        let number_and_place = self.planned << PLACE_BITS | u64::from(place);
        self.planned += 1;
        self.queue.push(Reverse(Event { at, number_and_place }));
    }

    /// Virtual time of the next planned event, if any.
    fn next_at(&self) -> Option<Nanos> {
        self.queue.peek().map(|Reverse(next)| next.at)
    }

    fn next(&mut self) -> Option<(Nanos, Plan)> {
        let Reverse(Event { at, number_and_place }) = self.queue.pop()?;
        let place = (number_and_place & ((1 << PLACE_BITS) - 1)) as u32;
        self.free.push(place);
        Some((at, self.plans[place as usize].take().expect("an event has a plan")))
    }
}

/// Identifier of a task: the index of its slot, and the slot's generation.
type TaskName = (u32, u32);

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Slot for a task. The generation distinguishes the tasks that have used the slot.
struct Slot {
    generation: u32,
    process: ProcessId,
    /// The task; `None` while the executor polls it, and after it has ended.
    task: Option<Task>,
    waker: Rc<Waker>,
    is_alive: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProcessState {
    Running,
    Stopped,
    Dead,
}

struct Process {
    state: ProcessState,
    /// Tasks woken while the process was stopped.
    held: Vec<TaskName>,
    on_death: Vec<Box<dyn FnOnce()>>,
}

/// Woken tasks, in the order in which they were woken. Shared with wakers, which the compiler requires to be
/// thread-safe.
#[derive(Default)]
struct Ready {
    /// Whether the queue has tasks. Relaxed loads suffice: the flag only tells when locking the queue is worthwhile.
    is_any: AtomicBool,
    woken: Mutex<VecDeque<TaskName>>,
}

impl Ready {
    fn push(&self, task: TaskName) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        woken.push_back(task);
        self.is_any.store(true, Ordering::Relaxed);
    }

    #[inline]
    fn pop(&self) -> Option<TaskName> {
        if !self.is_any.load(Ordering::Relaxed) {
            return None;
        }
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let first = woken.pop_front();
        self.is_any.store(!woken.is_empty(), Ordering::Relaxed);
        first
    }
}

struct TaskWaker {
    task: TaskName,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.ready.push(self.task);
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.ready.push(self.task);
    }
}

impl World {
    /// Creates a world at time 0.
    pub fn new(seed: u64) -> World {
        World(Rc::new(Inner {
            random: Random::new(seed),
            now: Cell::new(0),
            events: Cell::new(0),
            agenda: RefCell::default(),
            tasks: RefCell::default(),
            free: RefCell::default(),
            processes: RefCell::default(),
            ready: Arc::default(),
            current: Cell::new(None),
        }))
    }

    /// Present virtual time, in nanoseconds.
    #[inline]
    pub fn now(&self) -> Nanos {
        self.0.now.get()
    }

    /// The world's source of random draws.
    #[inline]
    pub fn random(&self) -> &Random {
        &self.0.random
    }

    /// Number of events so far: ended sleeps, arrived messages, accesses made.
    pub fn events(&self) -> u64 {
        self.0.events.get()
    }

    /// Starts a process that has no tasks yet. Returns the process's identifier.
    pub fn start_process(&self) -> ProcessId {
        let mut processes = self.0.processes.borrow_mut();
        processes.push(Process { state: ProcessState::Running, held: Vec::new(), on_death: Vec::new() });
        ProcessId(processes.len() as u32 - 1)
    }

    /// Spawns a task in a process. Does nothing if the process is dead.
    pub fn spawn(&self, process: ProcessId, task: impl Future<Output = ()> + 'static) {
        if self.state(process) == ProcessState::Dead {
            return;
        }
        let mut tasks = self.0.tasks.borrow_mut();
        let index = self.0.free.borrow_mut().pop().unwrap_or(tasks.len() as u32);
        let generation = tasks.get(index as usize).map_or(0, |slot| slot.generation + 1);
        let name = (index, generation);
        let waker = Waker::from(Arc::new(TaskWaker { task: name, ready: Arc::clone(&self.0.ready) }));
        let (task, waker) = (Some(Box::pin(task) as Task), Rc::new(waker));
        let slot = Slot { generation, process, task, waker, is_alive: true };
        match tasks.get_mut(index as usize) {
            Some(place) => *place = slot,
            None => tasks.push(slot),
        }
        drop(tasks);
        self.0.ready.push(name);
    }

    /// Calls `run` at time `at`, or at the present time if `at` has passed. The call belongs to no process.
    pub fn at(&self, at: Nanos, run: impl FnOnce() + 'static) {
        self.0.agenda.borrow_mut().add(at, Plan::Run(Box::new(run)));
    }

    /// Returns a future that completes in `ns` nanoseconds.
    #[inline]
    pub fn sleep(&self, ns: Nanos) -> Sleep {
        self.sleep_until(self.now().saturating_add(ns))
    }

    /// Returns a future that completes at time `until`, or immediately if `until` has passed.
    #[inline]
    pub fn sleep_until(&self, until: Nanos) -> Sleep {
        Sleep { world: self.clone(), until, waker: None }
    }

    /// Whether the process is alive: running or stopped.
    pub fn is_alive(&self, process: ProcessId) -> bool {
        self.state(process) != ProcessState::Dead
    }

    /// Whether the process is stopped.
    pub fn is_stopped(&self, process: ProcessId) -> bool {
        self.state(process) == ProcessState::Stopped
    }

    /// Returns the process of the running task, if a task is running.
    pub fn current(&self) -> Option<ProcessId> {
        self.0.current.get().map(|(_, process)| process)
    }

    /// Stops a process: none of its tasks runs until it is resumed (SIGSTOP).
    pub fn stop(&self, process: ProcessId) {
        let process = &mut self.0.processes.borrow_mut()[process.0 as usize];
        if process.state == ProcessState::Running {
            process.state = ProcessState::Stopped;
        }
    }

    /// Resumes a stopped process, so that its tasks run again.
    pub fn resume(&self, process: ProcessId) {
        let process = &mut self.0.processes.borrow_mut()[process.0 as usize];
        if process.state == ProcessState::Stopped {
            process.state = ProcessState::Running;
            process.held.drain(..).for_each(|task| self.0.ready.push(task));
        }
    }

    /// Kills a process at its present awaits, and calls its [`World::on_death`] callbacks.
    pub fn kill(&self, process: ProcessId) {
        let on_death = {
            let process = &mut self.0.processes.borrow_mut()[process.0 as usize];
            if process.state == ProcessState::Dead {
                return;
            }
            process.state = ProcessState::Dead;
            process.held.clear();
            std::mem::take(&mut process.on_death)
        };
        let mut dropped = Vec::new();
        for slot in self.0.tasks.borrow_mut().iter_mut() {
            if slot.process == process && slot.is_alive {
                slot.is_alive = false;
                dropped.extend(slot.task.take());
            }
        }
        // If a task kills its own process, the executor drops this task after its poll has returned. The slots of dead
        // processes are not reused, since few processes die in a world.
        drop(dropped);
        on_death.into_iter().for_each(|callback| callback());
    }

    /// Calls `callback` when the process dies, or immediately if it is dead.
    pub fn on_death(&self, process: ProcessId, callback: impl FnOnce() + 'static) {
        if self.is_alive(process) {
            self.0.processes.borrow_mut()[process.0 as usize].on_death.push(Box::new(callback));
        } else {
            callback();
        }
    }

    /// Runs the world until the time `until`, or until no events are left. Returns false if none are left.
    pub fn run_until(&self, until: Nanos) -> bool {
        self.run_while(until, || true)
    }

    /// Runs the world as [`World::run_until`] does, but stops when `continues` returns false. Calls `continues` after
    /// every event.
    pub fn run_while(&self, until: Nanos, mut continues: impl FnMut() -> bool) -> bool {
        loop {
            self.run_ready();
            if !continues() {
                return true;
            }
            let next = {
                let mut agenda = self.0.agenda.borrow_mut();
                if agenda.next_at().is_some_and(|at| at > until) {
                    self.0.now.set(until.max(self.now()));
                    return true;
                }
                agenda.next()
            };
            let Some((at, plan)) = next else { return false };
            self.0.now.set(at.max(self.now()));
            self.count_event();
            match plan {
                // Run it immediately: no other task is ready.
                Plan::Resume(task) => self.run_task(task),
                Plan::Wake(waker) => waker.wake(),
                Plan::Run(run) => run(),
            }
        }
    }

    /// Runs a future in a new process until the future completes, and returns the future's output. Returns `None` if
    /// the world runs out of events first, or if the future takes longer than `within` nanoseconds. Kills the process
    /// at the end.
    pub fn complete<T: 'static>(
        &self,
        within: Nanos,
        future: impl Future<Output = T> + 'static,
    ) -> Option<T> {
        let process = self.start_process();
        let outcome = Rc::new(Cell::new(None));
        let reported = Rc::clone(&outcome);
        let is_done = Rc::new(Cell::new(false));
        let done = Rc::clone(&is_done);
        self.spawn(process, async move {
            reported.set(Some(future.await));
            done.set(true);
        });
        self.run_while(self.now() + within, || !is_done.get());
        self.kill(process);
        outcome.take()
    }

    /// Kills all processes and drops all planned events. Call this for every world: tasks hold handles to their world,
    /// so that otherwise the world is leaked.
    pub fn end(&self) {
        let processes = self.0.processes.borrow().len() as u32;
        (0..processes).for_each(|process| self.kill(ProcessId(process)));
        let planned = self.0.agenda.take();
        drop(planned);
    }

    /// Counts an event that was not queued: an access that was made immediately.
    #[inline]
    pub(crate) fn count_event(&self) {
        self.0.events.set(self.0.events.get() + 1);
    }

    /// Wakes the task that `waker` belongs to at the virtual time `at`.
    fn wake_at(&self, at: Nanos, waker: &Waker) {
        let task = self.0.current.get().and_then(|(index, _)| {
            let slot = &self.0.tasks.borrow()[index as usize];
            slot.waker.will_wake(waker).then_some((index, slot.generation))
        });
        let plan = task.map_or_else(|| Plan::Wake(waker.clone()), Plan::Resume);
        self.0.agenda.borrow_mut().add(at, plan);
    }

    fn state(&self, process: ProcessId) -> ProcessState {
        self.0.processes.borrow()[process.0 as usize].state
    }

    fn run_ready(&self) {
        while let Some(name) = self.0.ready.pop() {
            self.run_task(name);
        }
    }

    fn run_task(&self, (index, generation): TaskName) {
        let (mut task, waker, process) = {
            let mut tasks = self.0.tasks.borrow_mut();
            let slot = &mut tasks[index as usize];
            if slot.generation != generation || !slot.is_alive {
                return;
            }
            let process = &mut self.0.processes.borrow_mut()[slot.process.0 as usize];
            if process.state == ProcessState::Stopped {
                process.held.push((index, generation));
                return;
            }
            let Some(task) = slot.task.take() else { return };
            (task, Rc::clone(&slot.waker), slot.process)
        };
        self.0.current.set(Some((index, process)));
        let poll = task.as_mut().poll(&mut Context::from_waker(&waker));
        self.0.current.set(None);
        let mut tasks = self.0.tasks.borrow_mut();
        let slot = &mut tasks[index as usize];
        if slot.is_alive && poll.is_pending() {
            slot.task = Some(task);
            return;
        }
        if slot.is_alive {
            slot.is_alive = false;
            self.0.free.borrow_mut().push(index);
        }
        drop(tasks);
        drop(task);
    }
}

/// Future that completes at a virtual time; see [`World::sleep`].
pub struct Sleep {
    world: World,
    until: Nanos,
    /// Waker of the task that polled last.
    waker: Option<Waker>,
}

impl Future for Sleep {
    type Output = ();

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.world.now() >= self.until {
            return Poll::Ready(());
        }
        // Another task than before may poll now.
        if self.waker.as_ref().is_none_or(|waker| !waker.will_wake(cx.waker())) {
            self.world.wake_at(self.until, cx.waker());
            self.waker = Some(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// Returns the future's output, or `None` if the future takes longer than `ns` nanoseconds.
pub async fn within<O>(world: &World, ns: Nanos, future: impl Future<Output = O>) -> Option<O> {
    let mut future = std::pin::pin!(future);
    let mut sleep = std::pin::pin!(world.sleep(ns));
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => sleep.as_mut().poll(cx).map(|()| None),
    })
    .await
}

/// Converts a duration to nanoseconds, saturating.
pub fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(Nanos::MAX)
}

/// Wakes tasks when some state has changed. A woken task checks that state itself.
#[derive(Default)]
pub struct Bell {
    waiting: RefCell<Vec<Waker>>,
    rung: Cell<u64>,
}

impl Bell {
    /// Wakes all tasks that wait for the bell.
    pub fn ring(&self) {
        self.rung.set(self.rung.get() + 1);
        self.waiting.borrow_mut().drain(..).for_each(Waker::wake);
    }

    /// Returns a future that completes at the next ring.
    pub fn rung(&self) -> impl Future<Output = ()> + '_ {
        let seen = self.rung.get();
        std::future::poll_fn(move |cx| {
            if self.rung.get() != seen {
                return Poll::Ready(());
            }
            self.wake_at_ring(cx.waker());
            Poll::Pending
        })
    }

    /// Wakes `waker` at the next ring.
    pub fn wake_at_ring(&self, waker: &Waker) {
        let mut waiting = self.waiting.borrow_mut();
        if !waiting.iter().any(|known| known.will_wake(waker)) {
            waiting.push(waker.clone());
        }
    }
}

/// Fair lock: one task at a time holds it, in the order of [`Turnstile::enter`] calls.
pub struct Turnstile {
    is_taken: Cell<bool>,
    line: RefCell<VecDeque<Weak<Cell<Place>>>>,
}

/// State of a task that waits for the turnstile.
enum Place {
    Waits(Option<Waker>),
    Called,
}

impl Default for Place {
    fn default() -> Place {
        Place::Waits(None)
    }
}

impl Default for Turnstile {
    fn default() -> Turnstile {
        Turnstile { is_taken: Cell::new(false), line: RefCell::default() }
    }
}

impl Turnstile {
    /// Waits until the turnstile is free. The caller then holds the turnstile until the caller drops the returned
    /// passage.
    pub async fn enter(&self) -> Passage<'_> {
        if !self.is_taken.replace(true) {
            return Passage(self);
        }
        let mine = Waiting { turnstile: self, place: Rc::new(Cell::new(Place::Waits(None))) };
        self.line.borrow_mut().push_back(Rc::downgrade(&mine.place));
        std::future::poll_fn(|cx| match mine.place.take() {
            Place::Called => Poll::Ready(()),
            Place::Waits(_) => {
                mine.place.set(Place::Waits(Some(cx.waker().clone())));
                Poll::Pending
            }
        })
        .await;
        Passage(self)
    }

    /// Whether a task is waiting for the turnstile.
    #[inline]
    pub fn is_awaited(&self) -> bool {
        !self.line.borrow().is_empty()
    }

    fn leave(&self) {
        while let Some(next) = self.line.borrow_mut().pop_front() {
            let Some(place) = next.upgrade() else { continue };
            if let Place::Waits(waker) = place.replace(Place::Called) {
                waker.into_iter().for_each(Waker::wake);
            }
            return;
        }
        self.is_taken.set(false);
    }
}

/// A task that waits for the turnstile. If its future is dropped after the turnstile has called the task, the
/// turnstile calls the next task.
struct Waiting<'a> {
    turnstile: &'a Turnstile,
    place: Rc<Cell<Place>>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if matches!(self.place.take(), Place::Called) {
            self.turnstile.leave();
        }
    }
}

/// Proof that a task holds the turnstile, from [`Turnstile::enter`]. Dropping it frees the turnstile.
pub struct Passage<'a>(&'a Turnstile);

impl Drop for Passage<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
