//! Jobs that belong to a client and not to the futures of its callers (owned posting).
//!
//! An operation that makes something visible to others, such as a lock, an intent or a reservation, runs as a job. The
//! caller's future only waits for the job's output. If the caller drops this future, the client's own task carries the
//! job on, to its end. The job learns that nobody waits for it, and may undo instead of finish.
//!
//! The client's task is one future, [`Jobs::serve`], which the program spawns on any executor: a client core, a foreign
//! executor or the simulator. It polls the jobs of those *lanes* that were woken. A lane carries out one job at a time.
//! A lane's first job allocates the lane's memory, and no other job allocates.
//!
//! A caller may *keep* a lane for several jobs, between which it decides what to do: [`Jobs::keep`]. It gives the lane
//! back with a last job, also if it has no time to wait for this one: [`Jobs::leave`].
//!
//! Invariant: a job that was begun is polled until it has ended, unless the client's task is dropped. So all requests
//! of a job are answered, or have failed, before its lane begins the next one.
//! Invariant: the last job of a kept lane is carried out, unless the client's task is dropped.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};

/// The lanes of a client. `J` describes a job, and `O` is its output.
pub struct Jobs<J, O> {
    lanes: Box<[Lane<J, O>]>,
    /// Callers that wait for a free lane, by their numbers, in the order in which they came.
    queue: RefCell<VecDeque<(u64, Waker)>>,
    next_caller: Cell<u64>,
    woken: Arc<Woken>,
    /// Whether the client's task was polled.
    is_served: Cell<bool>,
    is_closed: Cell<bool>,
}

/// The lanes that the client's task has to poll.
struct Woken {
    /// A bit for each lane.
    lanes: Box<[AtomicU64]>,
    /// Waker of the client's task.
    task: Mutex<Option<Waker>>,
}

impl Woken {
    fn new(lanes: usize) -> Woken {
        let words = lanes.div_ceil(u64::BITS as usize);
        Woken { lanes: (0..words).map(|_| AtomicU64::new(0)).collect(), task: Mutex::new(None) }
    }

    fn wake(&self, lane: usize) {
        let (word, bit) = (lane / u64::BITS as usize, 1 << (lane % u64::BITS as usize));
        // If the lane was woken before, the task has been woken, too, and has not polled the lane since.
        if self.lanes[word].fetch_or(bit, Ordering::AcqRel) & bit == 0 {
            self.wake_task();
        }
    }

    fn wake_task(&self) {
        if let Some(task) = &*self.task.lock().unwrap_or_else(PoisonError::into_inner) {
            task.wake_by_ref();
        }
    }

    /// Notes the waker of the client's task.
    fn register(&self, waker: &Waker) {
        let mut task = self.task.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *task {
            Some(task) => task.clone_from(waker),
            task => *task = Some(waker.clone()),
        }
    }

    /// Takes the lanes that were woken since the last call.
    fn take(&self) -> impl Iterator<Item = usize> + '_ {
        self.lanes.iter().enumerate().flat_map(|(word, lanes)| {
            let mut left = lanes.swap(0, Ordering::AcqRel);
            std::iter::from_fn(move || {
                let lane = left.trailing_zeros();
                left &= left.wrapping_sub(1);
                (lane < u64::BITS).then_some(word * u64::BITS as usize + lane as usize)
            })
        })
    }
}

/// Waker of a lane.
struct LaneWaker {
    woken: Arc<Woken>,
    lane: usize,
}

impl Wake for LaneWaker {
    fn wake(self: Arc<Self>) {
        self.woken.wake(self.lane);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.wake(self.lane);
    }
}

/// Place of a lane's job, and the lane's waker.
type Place<F> = (Pin<Box<Option<F>>>, Waker);

struct Lane<J, O> {
    state: RefCell<State<J, O>>,
    caller: RefCell<Option<Waker>>,
    is_abandoned: Cell<bool>,
    /// Whether a caller keeps the lane between its jobs.
    is_kept: Cell<bool>,
    /// The last job of a caller that has left the lane while an earlier job ran.
    last: RefCell<Option<J>>,
}

enum State<J, O> {
    Free,
    /// The job waits for the client's task.
    Asked(J),
    Running,
    /// The output waits for the caller.
    Done(O),
}

/// Error: the client's task has ended, so its jobs are not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

impl<J, O> Jobs<J, O> {
    /// Creates the lanes of a client.
    ///
    /// # Panics
    /// If `lanes` is 0.
    pub fn new(lanes: usize) -> Jobs<J, O> {
        assert!(lanes > 0, "a client has a lane");
        let lane = |_| Lane {
            state: RefCell::new(State::Free),
            caller: RefCell::new(None),
            is_abandoned: Cell::new(false),
            is_kept: Cell::new(false),
            last: RefCell::new(None),
        };
        Jobs {
            lanes: (0..lanes).map(lane).collect(),
            queue: RefCell::default(),
            next_caller: Cell::new(0),
            woken: Arc::new(Woken::new(lanes)),
            is_served: Cell::new(false),
            is_closed: Cell::new(false),
        }
    }

    /// Number of lanes.
    pub fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Carries out a job in a free lane, and returns its output. Waits for a lane if all are busy. If the future is
    /// dropped before the job has begun, the job is not carried out; if it is dropped later, the job runs to its end.
    ///
    /// # Errors
    /// The jobs were closed before the job began, or the client's task was dropped.
    pub async fn carry_out(&self, job: J) -> Result<O, Closed> {
        let number = self.lane().await?;
        self.begin(number, job).await
    }

    /// Carries out a job on this lane, as [`Jobs::carry_out`] does on any. Returns `None` if the lane is busy, or
    /// callers wait for a lane.
    ///
    /// # Errors
    /// Those of [`Jobs::carry_out`].
    pub async fn carry_out_on(&self, number: usize, job: J) -> Option<Result<O, Closed>> {
        if self.is_closed.get() || !self.lanes[number].is_free() || !self.queue.borrow().is_empty() {
            return None;
        }
        Some(self.begin(number, job).await)
    }

    /// Keeps a free lane for the jobs of this caller alone, until it leaves the lane. Returns the lane's number. Waits
    /// for a lane if all are busy or kept: a caller that keeps a lane must not wait for another one.
    ///
    /// # Errors
    /// The jobs were closed.
    pub async fn keep(&self) -> Result<usize, Closed> {
        let number = self.lane().await?;
        self.lanes[number].is_kept.set(true);
        Ok(number)
    }

    /// Carries out a job in a lane that this caller keeps, as [`Jobs::carry_out`] does in any. If the future is
    /// dropped, the job may still run: then the caller must leave the lane.
    ///
    /// # Errors
    /// Those of [`Jobs::carry_out`].
    pub async fn carry_out_in(&self, number: usize, job: J) -> Result<O, Closed> {
        if self.is_closed.get() {
            return Err(Closed);
        }
        self.begin(number, job).await
    }

    /// Carries out the last job in a lane that the caller has kept, and returns its output. The lane is free then. If
    /// the future is dropped after its first poll, the job is carried out nevertheless.
    ///
    /// # Errors
    /// The client's task has ended, or was dropped.
    pub async fn carry_out_last(&self, number: usize, job: J) -> Result<O, Closed> {
        self.lanes[number].is_kept.set(false);
        if !self.is_served() {
            return Err(Closed);
        }
        let waiting = Waiting { jobs: self, number, is_over: false, is_last: true };
        self.wait(waiting, job).await
    }

    /// Leaves a lane that this caller has kept: carries out a last job, for whose output nobody waits, after the one
    /// that may still run there.
    pub fn leave(&self, number: usize, last: J) {
        let lane = &self.lanes[number];
        lane.is_kept.set(false);
        lane.is_abandoned.set(true);
        let state = lane.state.replace(State::Free);
        match state {
            State::Running => {
                lane.state.replace(State::Running);
                lane.last.replace(Some(last));
            }
            State::Free | State::Asked(_) | State::Done(_) => {
                lane.state.replace(State::Asked(last));
            }
        }
        self.woken.wake(number);
    }

    /// Gives a job to a free lane, and waits for its output.
    async fn begin(&self, number: usize, job: J) -> Result<O, Closed> {
        self.wait(Waiting { jobs: self, number, is_over: false, is_last: false }, job).await
    }

    async fn wait(&self, mut waiting: Waiting<'_, J, O>, job: J) -> Result<O, Closed> {
        let number = waiting.number;
        let lane = &self.lanes[number];
        lane.is_abandoned.set(false);
        let before = lane.state.replace(State::Asked(job));
        assert!(matches!(before, State::Free), "a lane has one job at a time");
        self.woken.wake(number);
        let output = poll_fn(|cx| match lane.state.replace(State::Free) {
            State::Done(output) => Poll::Ready(Ok(output)),
            State::Free => Poll::Ready(Err(Closed)),
            state => {
                lane.state.replace(state);
                lane.caller.replace(Some(cx.waker().clone()));
                Poll::Pending
            }
        })
        .await;
        waiting.is_over = true;
        output
    }

    /// Waits until a lane is free. Returns its number.
    async fn lane(&self) -> Result<usize, Closed> {
        let number = self.next_caller.replace(self.next_caller.get() + 1);
        let _queued = Queued { jobs: self, number };
        poll_fn(|cx| {
            if self.is_closed.get() {
                return Poll::Ready(Err(Closed));
            }
            let mut queue = self.queue.borrow_mut();
            let is_first = queue.front().is_none_or(|(first, _)| *first == number);
            let free = self.lanes.iter().position(Lane::is_free);
            if let Some(free) = free.filter(|_| is_first) {
                return Poll::Ready(Ok(free));
            }
            match queue.iter_mut().find(|(queued, _)| *queued == number) {
                Some((_, waker)) => waker.clone_from(cx.waker()),
                None => queue.push_back((number, cx.waker().clone())),
            }
            Poll::Pending
        })
        .await
    }

    /// Carries out the jobs of all lanes, until the jobs are closed and the last one has ended. The program spawns this
    /// future once, as a task of the client. `perform` gets the lane's number and the job.
    ///
    /// If this future is dropped, the jobs are closed, and those that were begun are lost, as when a process dies.
    pub async fn serve<F: Future<Output = O>>(&self, mut perform: impl FnMut(usize, J) -> F) {
        let _closing = Serving(self);
        let mut places: Box<[Option<Place<F>>]> = self.lanes.iter().map(|_| None).collect();
        poll_fn(|cx| {
            self.woken.register(cx.waker());
            self.is_served.set(true);
            for number in self.woken.take() {
                let place = places[number].get_or_insert_with(|| {
                    let waker = LaneWaker { woken: Arc::clone(&self.woken), lane: number };
                    (Box::pin(None), Waker::from(Arc::new(waker)))
                });
                self.poll_lane(&self.lanes[number], place, |job| perform(number, job));
            }
            let is_busy =
                |lane: &Lane<J, O>| matches!(*lane.state.borrow(), State::Asked(_) | State::Running);
            let is_over = self.is_closed.get() && !self.lanes.iter().any(is_busy);
            if is_over { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Polls a lane's job, if the lane has one.
    fn poll_lane<F: Future<Output = O>>(
        &self,
        lane: &Lane<J, O>,
        (place, waker): &mut Place<F>,
        perform: impl FnOnce(J) -> F,
    ) {
        let state = lane.state.replace(State::Running);
        match state {
            State::Asked(job) => place.set(Some(perform(job))),
            State::Running => {}
            other => {
                lane.state.replace(other);
                return;
            }
        }
        let Some(running) = place.as_mut().as_pin_mut() else { return };
        let Poll::Ready(output) = running.poll(&mut Context::from_waker(waker)) else { return };
        place.set(None);
        if let Some(last) = lane.last.take() {
            lane.state.replace(State::Asked(last));
            waker.wake_by_ref();
        } else if lane.is_abandoned.get() {
            lane.state.replace(State::Free);
            self.wake_next();
        } else {
            lane.state.replace(State::Done(output));
            lane.caller.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Whether the caller of the lane's job has dropped its future, so that nobody waits for the output.
    pub fn is_abandoned(&self, lane: usize) -> bool {
        self.lanes[lane].is_abandoned.get()
    }

    /// Whether the client's task runs: it was polled at least once.
    pub fn is_served(&self) -> bool {
        self.is_served.get() && !self.is_closed.get()
    }

    /// Whether no lane has a job. Lanes may be kept.
    pub fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lane| matches!(*lane.state.borrow(), State::Free))
    }

    /// Begins no further jobs. [`Jobs::serve`] returns once the jobs that were begun have ended.
    pub fn close(&self) {
        self.is_closed.set(true);
        self.queue.take().into_iter().for_each(|(_, waker)| waker.wake());
        self.woken.wake_task();
    }

    /// Whether the jobs were closed.
    pub fn is_closed(&self) -> bool {
        self.is_closed.get()
    }

    fn wake_next(&self) {
        if let Some((_, waker)) = self.queue.borrow().front() {
            waker.wake_by_ref();
        }
    }
}

impl<J, O> Lane<J, O> {
    /// Whether any caller may give the lane a job.
    fn is_free(&self) -> bool {
        matches!(*self.state.borrow(), State::Free) && !self.is_kept.get()
    }
}

/// A caller in the queue for a lane. Dropping this value removes the caller.
struct Queued<'a, J, O> {
    jobs: &'a Jobs<J, O>,
    number: u64,
}

impl<J, O> Drop for Queued<'_, J, O> {
    fn drop(&mut self) {
        self.jobs.queue.borrow_mut().retain(|(number, _)| *number != self.number);
        // The next caller is first now, and there may be a free lane.
        self.jobs.wake_next();
    }
}

/// A caller that waits for its job. Dropping this value before the job's end abandons the job.
struct Waiting<'a, J, O> {
    jobs: &'a Jobs<J, O>,
    /// Number of the job's lane.
    number: usize,
    is_over: bool,
    /// Whether the job is carried out also if nobody waits for it.
    is_last: bool,
}

impl<J, O> Drop for Waiting<'_, J, O> {
    fn drop(&mut self) {
        let lane = &self.jobs.lanes[self.number];
        lane.caller.take();
        if self.is_over {
            return self.jobs.wake_next();
        }
        let state = lane.state.replace(State::Free);
        match state {
            State::Asked(last) if self.is_last => {
                lane.state.replace(State::Asked(last));
                lane.is_abandoned.set(true);
            }
            // The job did not begin, or its output was not taken: the lane is free.
            State::Free | State::Asked(_) | State::Done(_) => self.jobs.wake_next(),
            State::Running => {
                lane.state.replace(State::Running);
                lane.is_abandoned.set(true);
                self.jobs.woken.wake(self.number);
            }
        }
    }
}

/// The client's task. Dropping this value closes the jobs.
struct Serving<'a, J, O>(&'a Jobs<J, O>);

impl<J, O> Drop for Serving<'_, J, O> {
    fn drop(&mut self) {
        self.0.close();
        for lane in &self.0.lanes {
            let state = lane.state.replace(State::Free);
            lane.last.take();
            match state {
                State::Done(output) => _ = lane.state.replace(State::Done(output)),
                _ => lane.caller.take().into_iter().for_each(Waker::wake),
            }
        }
    }
}
