//! The client core: one thread with at most 64 tasks. While one task waits for memory or the network, others run.
//!
//! Each bit of a word says whether a task is ready. A *round* polls every task that was ready when it began. The names
//! here call a round a turn, because a session whose chains run on this CPU ends its turn (see the glossary) with the
//! round. Wakers are standard ones and may be sent to other threads; a wake on the core's own thread is a plain store.
//! If no task is ready, the core lets the endpoint wait, since the endpoint knows which events can arrive and from
//! where.
//!
//! Invariant: between rounds no task is running. At that moment an endpoint publishes that it holds no pointers.

use crate::timer::timespec;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use std::cell::Cell;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};
use std::thread::Thread;
use std::time::Duration;

/// Maximum number of tasks per core.
pub const TASKS_MAX: usize = 64;
/// Maximum number of descriptors on which a core sleeps.
pub const FDS_MAX: usize = 64;

/// Hooks that a core calls when a round ends, and when no task is ready. Each endpoint implements them.
pub trait Turns {
    /// Called at the end of a round: every task that was ready at its beginning was polled.
    fn end_turn(&self);

    /// Waits until a task may be ready, or for a shorter time. Called when no task is ready.
    fn wait(&self, core: &Idle<'_>) {
        core.sleep();
    }
}

impl Turns for () {
    fn end_turn(&self) {}
}

impl<T: Turns + ?Sized> Turns for &T {
    fn end_turn(&self) {
        (**self).end_turn();
    }

    fn wait(&self, core: &Idle<'_>) {
        (**self).wait(core);
    }
}

impl<T: Turns + ?Sized> Turns for std::rc::Rc<T> {
    fn end_turn(&self) {
        (**self).end_turn();
    }

    fn wait(&self, core: &Idle<'_>) {
        (**self).wait(core);
    }
}

/// A core without a ready task, as [`Turns::wait`] gets it.
pub struct Idle<'a>(&'a Ready);

impl Idle<'_> {
    /// Whether a task has been woken since the core became idle.
    #[inline]
    pub fn is_woken(&self) -> bool {
        self.0.here.load(Ordering::Relaxed) != 0 || self.0.elsewhere.load(Ordering::Relaxed) != 0
    }

    /// Sleeps until a task is woken.
    pub fn sleep(&self) {
        self.0.announced(PARKED, std::thread::park);
    }

    /// Sleeps until a task is woken, one of `fds` is readable, or `timeout` has passed. Watches at most [`FDS_MAX`]
    /// descriptors.
    pub fn sleep_on<'a>(&self, fds: impl Iterator<Item = BorrowedFd<'a>>, timeout: Option<Duration>) {
        let Some(bell) = self.0.bell() else { return std::thread::yield_now() };
        self.0.announced(POLLING, || {
            let mut count = 1;
            let mut fds = fds.inspect(|_| count += 1);
            let mut watched: [PollFd<'_>; 1 + FDS_MAX] = std::array::from_fn(|place| {
                let fd = if place == 0 { None } else { fds.next() };
                PollFd::from_borrowed_fd(fd.unwrap_or(bell.as_fd()), PollFlags::IN)
            });
            let timeout = timeout.map(timespec);
            // Even if interrupted: the caller polls again anyway.
            let _polled_again_anyway = poll(&mut watched[..count], timeout.as_ref());
            if !watched[0].revents().is_empty() {
                let _emptied = rustix::io::read(bell, &mut [0; 8]);
            }
        });
    }
}

/// The set of a core's ready tasks. Aligned so that a pointer to it has spare low bits for a task's index.
#[repr(align(64))]
struct Ready {
    /// Bitmap of the tasks woken on the core's own thread, which needs only plain loads and stores.
    here: AtomicU64,
    /// Bitmap of the tasks woken on other threads.
    elsewhere: AtomicU64,
    /// State of the core's thread: [`AWAKE`], [`PARKED`] or [`POLLING`].
    asleep: AtomicU8,
    thread: Thread,
    /// Wakes a core that waits for a descriptor. Created on the first such wait.
    bell: OnceLock<OwnedFd>,
}

const AWAKE: u8 = 0;
const PARKED: u8 = 1;
const POLLING: u8 = 2;

thread_local! {
    /// The core that runs on this thread.
    static CURRENT: Cell<*const Ready> = const { Cell::new(std::ptr::null()) };
    /// Number of tasks of the core that runs on this thread.
    static TASKS: Cell<usize> = const { Cell::new(0) };
    /// Number of rounds of all cores on this thread so far.
    static TURNS: Cell<u64> = const { Cell::new(0) };
}

/// Whether the core on this thread has other tasks, which can run while the current one waits for memory.
#[inline]
pub fn in_company() -> bool {
    TASKS.get() > 1
}

/// Whether the core on this thread has no other task than the current one.
#[inline]
pub fn is_alone() -> bool {
    TASKS.get() == 1
}

/// Returns the number of the current round, if a core runs on this thread. The number is unique within the thread.
#[inline]
pub fn turn() -> Option<u64> {
    (!CURRENT.get().is_null()).then(|| TURNS.get())
}

/// Lets the other tasks that are ready run first.
#[inline]
pub fn yield_now() -> impl Future<Output = ()> {
    struct Yield(bool);
    impl Future for Yield {
        type Output = ();
        #[inline]
        fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
            if std::mem::replace(&mut self.0, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        }
    }
    Yield(false)
}

/// Runs one future to completion on this thread.
pub fn block_on<O>(turns: impl Turns, future: impl Future<Output = O>) -> O {
    let mut output = None;
    let mut core = Core::new(turns);
    core.spawn(async { output = Some(future.await) });
    core.run();
    drop(core);
    output.expect("the core ran its only task to completion")
}

/// A client core. Stays on one thread.
pub struct Core<'a, T: Turns> {
    tasks: Vec<Option<Task<'a>>>,
    alive: usize,
    ready: Arc<Ready>,
    turns: T,
    not_send: PhantomData<*const ()>,
}

struct Task<'a> {
    future: Pin<Box<dyn Future<Output = ()> + 'a>>,
    waker: Waker,
}

impl<'a, T: Turns> Core<'a, T> {
    /// Creates a core without tasks, which calls `turns` at the end of each round and to wait.
    pub fn new(turns: T) -> Core<'a, T> {
        let ready = Arc::new(Ready {
            here: AtomicU64::new(0),
            elsewhere: AtomicU64::new(0),
            asleep: AtomicU8::new(AWAKE),
            thread: std::thread::current(),
            bell: OnceLock::new(),
        });
        Core { tasks: Vec::new(), alive: 0, ready, turns, not_send: PhantomData }
    }

    /// Adds a task.
    ///
    /// # Panics
    /// If the core already has [`TASKS_MAX`] tasks.
    pub fn spawn(&mut self, future: impl Future<Output = ()> + 'a) {
        let index = self.tasks.iter().position(Option::is_none).unwrap_or(self.tasks.len());
        assert!(index < TASKS_MAX, "a core has at most {TASKS_MAX} tasks");
        if index == self.tasks.len() {
            self.tasks.push(None);
        }
        self.tasks[index] = Some(Task { future: Box::pin(future), waker: waker(&self.ready, index) });
        self.alive += 1;
        self.ready.elsewhere.fetch_or(1 << index, Ordering::Release);
    }

    /// Runs until all tasks are complete. Sleeps while none is ready.
    pub fn run(&mut self) {
        let _entered = Entered::new(&self.ready, self.alive);
        while self.alive > 0 {
            let ready = self.ready.take();
            if ready == 0 {
                self.turns.wait(&Idle(&self.ready));
                continue;
            }
            self.turn(ready);
        }
    }

    #[inline]
    fn turn(&mut self, mut ready: u64) {
        TURNS.set(TURNS.get() + 1);
        while ready != 0 {
            let index = ready.trailing_zeros() as usize;
            ready &= ready - 1;
            // A waker that outlives its task may name a completed task.
            let Some(Some(task)) = self.tasks.get_mut(index) else { continue };
            if task.future.as_mut().poll(&mut Context::from_waker(&task.waker)).is_ready() {
                self.tasks[index] = None;
                self.alive -= 1;
                TASKS.set(self.alive);
            }
        }
        self.turns.end_turn();
    }
}

/// Guard that makes a core the current one of this thread, and restores the previous one on drop.
struct Entered {
    outer: *const Ready,
    outer_tasks: usize,
}

impl Entered {
    fn new(ready: &Arc<Ready>, tasks: usize) -> Entered {
        assert!(ready.thread.id() == std::thread::current().id(), "a core runs on the thread that made it");
        Entered { outer: CURRENT.replace(Arc::as_ptr(ready)), outer_tasks: TASKS.replace(tasks) }
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
        TASKS.set(self.outer_tasks);
    }
}

impl Ready {
    #[inline]
    fn take(&self) -> u64 {
        let here = self.here.load(Ordering::Relaxed);
        self.here.store(0, Ordering::Relaxed);
        if self.elsewhere.load(Ordering::Relaxed) == 0 {
            return here;
        }
        // Acquire: pairs with the Release of the wake, so that the task sees why it was woken.
        here | self.elsewhere.swap(0, Ordering::Acquire)
    }

    /// Stores `how` in `asleep`, then calls `sleep`. Does not sleep if a task has been woken before.
    fn announced(&self, how: u8, sleep: impl FnOnce()) {
        // SeqCst, as in `wake`: either the waker sees us asleep, or we see its bit.
        self.asleep.store(how, Ordering::SeqCst);
        if self.here.load(Ordering::Relaxed) == 0 && self.elsewhere.load(Ordering::SeqCst) == 0 {
            sleep();
        }
        self.asleep.store(AWAKE, Ordering::Relaxed);
    }

    /// Returns the bell, and creates it on the first call. `None` if the system cannot create another descriptor now.
    fn bell(&self) -> Option<&OwnedFd> {
        if self.bell.get().is_none() {
            let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).ok()?;
            let _only_this_thread_makes_it = self.bell.set(bell);
        }
        self.bell.get()
    }

    #[inline]
    fn wake(&self, index: usize) {
        if std::ptr::eq(CURRENT.get(), self) {
            let here = self.here.load(Ordering::Relaxed);
            self.here.store(here | 1 << index, Ordering::Relaxed);
            return;
        }
        self.elsewhere.fetch_or(1 << index, Ordering::SeqCst);
        match self.asleep.load(Ordering::SeqCst) {
            PARKED => self.thread.unpark(),
            POLLING => {
                let bell = self.bell.get().expect("a core creates its bell before it polls it");
                // A failed write means that the counter is full: the bell is already readable.
                let _rings_already = rustix::io::write(bell.as_fd(), &1u64.to_ne_bytes());
            }
            _ => {}
        }
    }
}

// A waker's data pointer is the address of the `Ready` plus the task's index. The waker owns one reference count.

static WAKER: RawWakerVTable = RawWakerVTable::new(
    |data| {
        let (ready, _) = split(data);
        // SAFETY: the waker being cloned owns a count, so the `Ready` is alive.
        unsafe { Arc::increment_strong_count(ready) };
        RawWaker::new(data, &WAKER)
    },
    |data| {
        let (ready, index) = split(data);
        // SAFETY: takes over the count that this waker owns.
        unsafe { Arc::from_raw(ready) }.wake(index);
    },
    |data| {
        let (ready, index) = split(data);
        // SAFETY: this waker owns a count for as long as it exists.
        unsafe { &*ready }.wake(index);
    },
    |data| {
        let (ready, _) = split(data);
        // SAFETY: takes over the count that this waker owns.
        drop(unsafe { Arc::from_raw(ready) });
    },
);

fn waker(ready: &Arc<Ready>, index: usize) -> Waker {
    let data = Arc::into_raw(Arc::clone(ready)).cast::<()>().wrapping_byte_add(index);
    // SAFETY: the table keeps the contract of a waker: `data` owns a count, and `Ready` is Sync.
    unsafe { Waker::from_raw(RawWaker::new(data, &WAKER)) }
}

#[inline]
fn split(data: *const ()) -> (*const Ready, usize) {
    let index = data.addr() % TASKS_MAX;
    (data.wrapping_byte_sub(index).cast(), index)
}

const _: () = assert!(align_of::<Ready>() == TASKS_MAX);

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn tasks_take_turns() {
        let log = RefCell::new(Vec::new());
        let mut core = Core::new(());
        for task in 0..3 {
            let log = &log;
            core.spawn(async move {
                for step in 0..2 {
                    log.borrow_mut().push((step, task));
                    yield_now().await;
                }
            });
        }
        core.run();
        drop(core);
        assert_eq!(log.into_inner(), [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]);
    }

    #[test]
    fn turns_are_numbered_where_a_core_runs() {
        assert_eq!(turn(), None);
        let seen = RefCell::new(Vec::new());
        let mut core = Core::new(());
        for _ in 0..2 {
            core.spawn(async {
                for _ in 0..2 {
                    seen.borrow_mut().push(turn().expect("a core runs"));
                    yield_now().await;
                }
            });
        }
        core.run();
        drop(core);
        let [a, b, c, d] = seen.into_inner()[..] else { panic!("two tasks ran twice") };
        assert!(a == b && c == d && a < c, "all tasks of a turn see the same number");
    }

    #[test]
    fn a_core_sleeps_until_another_thread_wakes_its_task() {
        let slept = std::time::Duration::from_millis(20);
        let before = std::time::Instant::now();
        let answer = block_on((), async {
            crate::timer::sleep(slept).await;
            7
        });
        assert_eq!(answer, 7);
        assert!(before.elapsed() >= slept);
    }

    #[test]
    fn a_waker_outlives_its_core() {
        let kept = RefCell::new(None);
        block_on(
            (),
            std::future::poll_fn(|cx| {
                *kept.borrow_mut() = Some(cx.waker().clone());
                Poll::Ready(())
            }),
        );
        let waker = kept.into_inner().expect("the task stored its waker");
        waker.wake_by_ref();
        std::thread::spawn(move || waker.wake()).join().expect("waking a completed task does nothing");
    }

    #[test]
    fn sixty_four_tasks_fit_and_each_completes() {
        let done = Cell::new(0);
        let mut core = Core::new(());
        for _ in 0..TASKS_MAX {
            core.spawn(async {
                yield_now().await;
                done.set(done.get() + 1);
            });
        }
        core.run();
        drop(core);
        assert_eq!(done.get(), TASKS_MAX);
    }
}
