//! One request for concurrent operations on one key: gets share a READ, and puts a WRITE ("read delegation and write
//! combining").
//!
//! Operations on a key form batches. A batch is *open* until its request is sent: operations join an open batch, and
//! those that come later form the next one. A batch is sent when the one before it has ended. So at most one batch of
//! gets and one of puts are in flight for each key of a client, and a lock has one contender of each client.
//!
//! The first member of a batch carries it out. All members return its result. The members of a batch of puts take
//! effect at its WRITE, one after the other in the order in which they have joined: the value of the last one is
//! written. Each has begun before the request was sent, and returns after it was answered, so a batch is linearizable.
//!
//! If the future of the member that carries out a batch is dropped before a request was sent on behalf of the others,
//! they join or form another batch. A put that was begun belongs to the client and is carried to its end.
//!
//! Differs from the artifact, where operations also take the result of a request that was sent before they began
//! ([`Window`](crate::index::Combining::Window)): a get may then return a value that another client has replaced
//! before, and a put may be lost, although it returns.
//!
//! Invariant: a value that a batch writes was put by a member of that batch, for its key. The table has keys and no
//! hashes.

use super::mutants;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The batches of a client's gets, or of its puts. `T` is their result.
pub(super) struct Combine<T> {
    keys: RefCell<BTreeMap<Vec<u8>, State<T>>>,
    next_member: Cell<u64>,
}

/// The batches of one key.
struct State<T> {
    running: Option<Rc<Batch<T>>>,
    open: Option<Rc<Batch<T>>>,
}

pub(super) struct Batch<T> {
    /// The members that wait, in the order in which they have joined.
    members: RefCell<BTreeMap<u64, Option<Waker>>>,
    /// The value of the last member.
    value: RefCell<Vec<u8>>,
    result: RefCell<Option<T>>,
    /// Whether the client's task carries out the batch, whether or not a member waits.
    is_begun: Cell<bool>,
    /// Whether the member that was to carry out the batch has gone.
    is_broken: Cell<bool>,
}

/// What an operation has to do.
pub(super) enum Turn<'a, T> {
    /// It carries out its batch.
    Lead(Leading<'a, T>),
    /// Another member has carried it out, with this result.
    Done(T),
}

/// The right to carry out a batch.
pub(super) struct Leading<'a, T> {
    combine: &'a Combine<T>,
    path: Vec<u8>,
    batch: Rc<Batch<T>>,
}

/// A member of a batch.
struct Member<'a, T> {
    combine: &'a Combine<T>,
    path: &'a [u8],
    batch: Rc<Batch<T>>,
    number: u64,
}

impl<T> Default for Combine<T> {
    fn default() -> Combine<T> {
        Combine { keys: RefCell::default(), next_member: Cell::new(0) }
    }
}

impl<T> Default for Batch<T> {
    fn default() -> Batch<T> {
        Batch {
            members: RefCell::default(),
            value: RefCell::default(),
            result: RefCell::default(),
            is_begun: Cell::new(false),
            is_broken: Cell::new(false),
        }
    }
}

impl<T> Batch<T> {
    fn wake(&self) {
        let wakers: Vec<Waker> = self.members.borrow_mut().values_mut().filter_map(Option::take).collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// A batch that no other operation joins.
    pub(super) fn of(value: &[u8]) -> Batch<T> {
        Batch { value: RefCell::new(value.to_vec()), ..Batch::default() }
    }

    /// Notes that the client's task carries out the batch.
    pub(super) fn begin(&self) {
        self.is_begun.set(true);
    }

    /// Copies the value of the last member.
    pub(super) fn value(&self, into: &mut Vec<u8>) {
        self.value.borrow().clone_into(into);
    }
}

impl<T: Clone> Combine<T> {
    /// Joins the open batch of a path, or forms one. Returns once the batch has ended, or is this operation's to carry
    /// out. If `is_late`, joins a batch that is being carried out.
    pub(super) async fn turn<'a>(&'a self, path: &'a [u8], value: &[u8], is_late: bool) -> Turn<'a, T> {
        loop {
            let member = self.join(path, value, is_late);
            let turn = poll_fn(|cx| {
                let batch = &member.batch;
                if let Some(result) = &*batch.result.borrow() {
                    return Poll::Ready(Some(Turn::Done(result.clone())));
                }
                if batch.is_broken.get() {
                    return Poll::Ready(None);
                }
                if self.leads(&member) {
                    let (combine, path, batch) = (self, path.to_vec(), Rc::clone(batch));
                    return Poll::Ready(Some(Turn::Lead(Leading { combine, path, batch })));
                }
                if let Some(waker) = batch.members.borrow_mut().get_mut(&member.number) {
                    *waker = Some(cx.waker().clone());
                }
                Poll::Pending
            })
            .await;
            if let Some(turn) = turn {
                return turn;
            }
        }
    }

    fn join<'a>(&'a self, path: &'a [u8], value: &[u8], is_late: bool) -> Member<'a, T> {
        let mut keys = self.keys.borrow_mut();
        let state = keys.entry(path.to_vec()).or_insert_with(|| State { running: None, open: None });
        let batch = match &state.running {
            Some(running) if is_late => Rc::clone(running),
            _ => Rc::clone(state.open.get_or_insert_with(Rc::default)),
        };
        let number = self.next_member.replace(self.next_member.get() + 1);
        batch.members.borrow_mut().insert(number, None);
        value.clone_into(&mut batch.value.borrow_mut());
        Member { combine: self, path, batch, number }
    }

    /// Whether a member carries out its batch now. If so, the batch counts as being carried out.
    fn leads(&self, member: &Member<'_, T>) -> bool {
        let mut keys = self.keys.borrow_mut();
        let Some(state) = keys.get_mut(member.path) else { return false };
        let is_open = state.open.as_ref().is_some_and(|open| Rc::ptr_eq(open, &member.batch));
        let is_first = member.batch.members.borrow().keys().next() == Some(&member.number);
        let leads = is_open && is_first && state.running.is_none();
        if leads {
            state.running = Some(Rc::clone(&member.batch));
        }
        leads
    }
}

impl<T> Combine<T> {
    /// Lets no further operation join a batch.
    pub(super) fn close(&self, path: &[u8], batch: &Rc<Batch<T>>) {
        if let Some(state) = self.keys.borrow_mut().get_mut(path)
            && state.open.as_ref().is_some_and(|open| Rc::ptr_eq(open, batch))
        {
            state.open = None;
        }
    }

    /// Ends a batch, with its result for those that wait for it. Does nothing if it has ended.
    pub(super) fn finish(&self, path: &[u8], batch: &Rc<Batch<T>>, result: T) {
        if batch.result.borrow().is_none() {
            batch.result.replace(Some(result));
            self.end(path, batch);
        }
    }

    /// Lets the next batch of the path begin.
    fn end(&self, path: &[u8], batch: &Rc<Batch<T>>) {
        self.close(path, batch);
        let next = {
            let mut keys = self.keys.borrow_mut();
            let Some(state) = keys.get_mut(path) else { return };
            if state.running.as_ref().is_some_and(|running| Rc::ptr_eq(running, batch)) {
                state.running = None;
            }
            let next = state.open.clone();
            if next.is_none() && state.running.is_none() {
                keys.remove(path);
            }
            next
        };
        batch.wake();
        next.iter().for_each(|next| next.wake());
    }
}

impl<T> Leading<'_, T> {
    /// The batch.
    pub(super) fn batch(&self) -> &Rc<Batch<T>> {
        &self.batch
    }

    /// Lets no further operation join. The batch's request is sent next.
    pub(super) fn close(&self) {
        self.combine.close(&self.path, &self.batch);
    }

    /// Ends the batch.
    pub(super) fn finish(self, result: T) {
        self.combine.finish(&self.path, &self.batch, result);
    }
}

impl<T> Drop for Leading<'_, T> {
    fn drop(&mut self) {
        let is_over = self.batch.result.borrow().is_some() || self.batch.is_begun.get();
        if !is_over && !mutants::JOINERS_STRANDED.is_on() {
            self.batch.is_broken.set(true);
            self.combine.end(&self.path, &self.batch);
        }
    }
}

impl<T> Drop for Member<'_, T> {
    fn drop(&mut self) {
        self.batch.members.borrow_mut().remove(&self.number);
        let is_empty = self.batch.members.borrow().is_empty();
        let is_running = {
            let keys = self.combine.keys.borrow();
            let state = keys.get(self.path);
            state.and_then(|state| state.running.as_ref()).is_some_and(|run| Rc::ptr_eq(run, &self.batch))
        };
        if is_running {
            return; // The member has become the one that carries it out, or has waited for that one.
        }
        if is_empty {
            self.combine.end(self.path, &self.batch);
        } else {
            // The next member may carry out the batch.
            self.batch.wake();
        }
    }
}
