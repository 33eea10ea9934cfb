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
//! A get whose key no other operation has is a batch of one that is sent at once ([`Alone`]): it only notes its key.
//!
//! Differs from the artifact, where operations also take the result of a request that was sent before they began
//! ([`Window`](crate::index::Combining::Window)): a get may then return a value that another client has replaced
//! before, and a put may be lost, although it returns.
//!
//! Invariant: a value that a batch writes was put by a member of that batch, for its key. The table compares keys, and
//! hashes only to find them.
//! Invariant: a key has a line in the table if and only if it has a batch.

use super::mutants;
use rapidhash::v3::rapidhash_v3 as rapidhash;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// The batches of a client's gets, or of its puts. `T` is their result.
pub(super) struct Combine<T> {
    table: RefCell<Table<T>>,
    next_member: Cell<u64>,
}

/// The batches of all keys. Their number is that of the client's tasks at most, so a search compares all tags.
struct Table<T> {
    /// Tags of the keys of the lines.
    tags: Vec<u64>,
    lines: Vec<Line<T>>,
    /// Buffers for the paths of further lines.
    spare: Vec<Vec<u8>>,
}

/// The batches of one key.
struct Line<T> {
    path: Vec<u8>,
    running: Running<T>,
    open: Option<Rc<Batch<T>>>,
}

enum Running<T> {
    None,
    /// An [`Alone`].
    Alone,
    Batch(Rc<Batch<T>>),
}

impl<T> Running<T> {
    fn is(&self, batch: &Rc<Batch<T>>) -> bool {
        matches!(self, Running::Batch(running) if Rc::ptr_eq(running, batch))
    }
}

impl<T> Default for Table<T> {
    fn default() -> Table<T> {
        Table { tags: Vec::new(), lines: Vec::new(), spare: Vec::new() }
    }
}

impl<T> Table<T> {
    #[inline]
    fn find(&self, path: &[u8]) -> Option<usize> {
        let tag = tag_of(path);
        let mut equal = self.tags.iter().enumerate().filter(|(_, other)| **other == tag);
        equal.find(|(at, _)| self.lines[*at].path == path).map(|(at, _)| at)
    }

    fn line(&mut self, path: &[u8]) -> Option<&mut Line<T>> {
        self.find(path).map(|at| &mut self.lines[at])
    }

    #[inline]
    fn add(&mut self, path: &[u8], running: Running<T>) -> &mut Line<T> {
        let mut own = self.spare.pop().unwrap_or_default();
        own.clear();
        own.extend_from_slice(path);
        self.tags.push(tag_of(path));
        self.lines.push(Line { path: own, running, open: None });
        self.lines.last_mut().expect("it was pushed")
    }

    #[inline]
    fn remove(&mut self, at: usize) {
        self.tags.swap_remove(at);
        self.spare.push(self.lines.swap_remove(at).path);
    }
}

/// Tag of a path, which is the path itself if it is a number.
#[inline]
fn tag_of(path: &[u8]) -> u64 {
    path.try_into().map_or_else(|_| rapidhash(path), u64::from_le_bytes)
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

/// The right to carry out a batch that has no other members, and that none can join.
pub(super) struct Alone<'a, T> {
    combine: &'a Combine<T>,
    path: &'a [u8],
    is_over: bool,
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
        Combine { table: RefCell::default(), next_member: Cell::new(0) }
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
    /// Forms a batch that no operation can join. Returns `None` if the path has a batch.
    #[inline]
    pub(super) fn alone<'a>(&'a self, path: &'a [u8]) -> Option<Alone<'a, T>> {
        let mut table = self.table.borrow_mut();
        if table.find(path).is_some() {
            return None;
        }
        table.add(path, Running::Alone);
        Some(Alone { combine: self, path, is_over: false })
    }

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
        let mut table = self.table.borrow_mut();
        let line = match table.find(path) {
            Some(at) => &mut table.lines[at],
            None => table.add(path, Running::None),
        };
        let batch = match &line.running {
            Running::Batch(running) if is_late => Rc::clone(running),
            _ => Rc::clone(line.open.get_or_insert_with(Rc::default)),
        };
        let number = self.next_member.replace(self.next_member.get() + 1);
        batch.members.borrow_mut().insert(number, None);
        value.clone_into(&mut batch.value.borrow_mut());
        Member { combine: self, path, batch, number }
    }

    /// Whether a member carries out its batch now. If so, the batch counts as being carried out.
    fn leads(&self, member: &Member<'_, T>) -> bool {
        let mut table = self.table.borrow_mut();
        let Some(line) = table.line(member.path) else { return false };
        let is_open = line.open.as_ref().is_some_and(|open| Rc::ptr_eq(open, &member.batch));
        let is_first = member.batch.members.borrow().keys().next() == Some(&member.number);
        let leads = is_open && is_first && matches!(line.running, Running::None);
        if leads {
            line.running = Running::Batch(Rc::clone(&member.batch));
        }
        leads
    }
}

impl<T> Combine<T> {
    /// Lets no further operation join a batch.
    pub(super) fn close(&self, path: &[u8], batch: &Rc<Batch<T>>) {
        if let Some(line) = self.table.borrow_mut().line(path)
            && line.open.as_ref().is_some_and(|open| Rc::ptr_eq(open, batch))
        {
            line.open = None;
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
        let next = self.leave(path, |running| running.is(batch));
        batch.wake();
        next.iter().for_each(|next| next.wake());
    }

    /// Ends the running batch if it is the one meant. Returns the batch that may begin.
    #[inline]
    fn leave(&self, path: &[u8], is_meant: impl FnOnce(&Running<T>) -> bool) -> Option<Rc<Batch<T>>> {
        let mut table = self.table.borrow_mut();
        let at = table.find(path)?;
        let line = &mut table.lines[at];
        if is_meant(&line.running) {
            line.running = Running::None;
        }
        let next = line.open.clone();
        if next.is_none() && matches!(line.running, Running::None) {
            table.remove(at);
        }
        next
    }
}

impl<T> Alone<'_, T> {
    /// Ends the batch.
    pub(super) fn finish(mut self) {
        self.is_over = true;
    }
}

impl<T> Drop for Alone<'_, T> {
    fn drop(&mut self) {
        if self.is_over || !mutants::JOINERS_STRANDED.is_on() {
            let next = self.combine.leave(self.path, |running| matches!(running, Running::Alone));
            next.iter().for_each(|next| next.wake());
        }
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
            let mut table = self.combine.table.borrow_mut();
            table.line(self.path).is_some_and(|line| line.running.is(&self.batch))
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
