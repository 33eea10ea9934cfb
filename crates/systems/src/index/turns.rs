//! Local locks: the lanes of a client that want one lock of the nodes wait for each other here, in the order of their
//! arrival, and may hand the lock over (Sherman's paper, 4.3).
//!
//! A lane first gets the local lock, then takes the lock at the node by CAS. In Sherman, if another lane waits when it
//! is done, it leaves the lock at the node taken, and hands it over with the local lock. So the next lane sends no CAS.
//! After [`HANDOVERS_MAX`] handovers the lock is freed, so that other clients get their turn.
//!
//! Invariant: of one lock, one lane has the local lock.
//! Invariant: a lock is handed over only after all requests under it were answered.

use crate::lease::LockWord;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

/// Number of times in a row that a lock is handed over.
pub(in crate::index) const HANDOVERS_MAX: u32 = 4;

/// A lock at a node that is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::index) struct Held {
    /// Word of the lock.
    pub(in crate::index) word: LockWord,
    /// Number of times that it was handed over.
    pub(in crate::index) times: u32,
}

/// The local locks of a client, for locks at the nodes whose places are of the type `A`.
#[derive(Debug)]
pub(in crate::index) struct Locals<A> {
    /// The lanes that wait for each local lock that some lane has.
    waiting: RefCell<BTreeMap<A, VecDeque<Rc<Waiting>>>>,
}

impl<A> Default for Locals<A> {
    fn default() -> Locals<A> {
        Locals { waiting: RefCell::default() }
    }
}

/// A lane that waits.
#[derive(Debug, Default)]
struct Waiting {
    /// The turn that it was given, and the lock at the node, if that is handed over, too.
    given: Cell<Option<Option<Held>>>,
    waker: RefCell<Option<Waker>>,
}

/// A local lock that a lane has. Dropping it lets the next lane in.
#[derive(Debug)]
pub(in crate::index) struct Turn<'a, A: Ord + Copy> {
    locals: &'a Locals<A>,
    at: A,
    held: Option<Held>,
}

impl<A: Ord + Copy> Locals<A> {
    /// Waits for the local lock.
    pub(in crate::index) async fn enter(&self, at: A) -> Turn<'_, A> {
        let own = {
            let mut waiting = self.waiting.borrow_mut();
            match waiting.get_mut(&at) {
                None => {
                    waiting.insert(at, VecDeque::new());
                    return Turn { locals: self, at, held: None };
                }
                Some(queue) => {
                    let own = Rc::new(Waiting::default());
                    queue.push_back(Rc::clone(&own));
                    own
                }
            }
        };
        let mut place = Place { locals: self, at, own, is_over: false };
        let held = poll_fn(|cx| match place.own.given.take() {
            Some(held) => Poll::Ready(held),
            None => {
                place.own.waker.replace(Some(cx.waker().clone()));
                Poll::Pending
            }
        })
        .await;
        place.is_over = true;
        Turn { locals: self, at, held }
    }

    /// Gives the local lock to the next lane.
    fn pass(&self, at: A, held: Option<Held>) {
        let mut waiting = self.waiting.borrow_mut();
        let next = waiting.get_mut(&at).and_then(VecDeque::pop_front);
        match next {
            Some(next) => {
                next.given.set(Some(held));
                next.waker.take().into_iter().for_each(Waker::wake);
            }
            None => _ = waiting.remove(&at),
        }
    }
}

impl<A: Ord + Copy> Turn<'_, A> {
    /// Takes the lock at the node that the lane before has handed over, if it has.
    pub(in crate::index) fn take_held(&mut self) -> Option<Held> {
        self.held.take()
    }

    /// Whether another lane waits.
    pub(in crate::index) fn is_wanted(&self) -> bool {
        self.locals.waiting.borrow().get(&self.at).is_some_and(|queue| !queue.is_empty())
    }

    /// Gives the next lane also the lock at the node, which stays taken.
    pub(in crate::index) fn hand_over(&mut self, held: Held) {
        self.held = Some(held);
    }
}

impl<A: Ord + Copy> Drop for Turn<'_, A> {
    fn drop(&mut self) {
        self.locals.pass(self.at, self.held.take());
    }
}

/// Place of a lane that waits. If the lane goes, so does its place.
struct Place<'a, A: Ord + Copy> {
    locals: &'a Locals<A>,
    at: A,
    own: Rc<Waiting>,
    is_over: bool,
}

impl<A: Ord + Copy> Drop for Place<'_, A> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        if let Some(held) = self.own.given.take() {
            return self.locals.pass(self.at, held);
        }
        if let Some(queue) = self.locals.waiting.borrow_mut().get_mut(&self.at) {
            queue.retain(|waiting| !Rc::ptr_eq(waiting, &self.own));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::ClientId;
    use std::pin::pin;
    use std::task::Context;

    const AT: u32 = 7;

    #[test]
    fn lanes_get_a_lock_in_order_and_with_it_what_is_handed_over() {
        let locals = Locals::default();
        let mut cx = Context::from_waker(Waker::noop());
        let Poll::Ready(mut first) = pin!(locals.enter(AT)).poll(&mut cx) else { panic!("it is free") };
        assert!(!first.is_wanted());
        let (mut second, mut third) = (pin!(locals.enter(AT)), pin!(locals.enter(AT)));
        assert!(second.as_mut().poll(&mut cx).is_pending() && third.as_mut().poll(&mut cx).is_pending());
        assert!(first.is_wanted());
        let word = ClientId::new(1).and_then(|id| LockWord::new(id, 5)).expect("48 bits");
        first.hand_over(Held { word, times: 1 });
        drop(first);
        assert!(third.as_mut().poll(&mut cx).is_pending(), "the second is before it");
        let Poll::Ready(mut second) = second.poll(&mut cx) else { panic!("it is its turn") };
        assert_eq!(second.take_held(), Some(Held { word, times: 1 }));
        drop(second);
        let Poll::Ready(mut third) = third.poll(&mut cx) else { panic!("it is its turn") };
        assert_eq!(third.take_held(), None);
        drop(third);
        assert!(locals.waiting.borrow().is_empty());
    }

    #[test]
    fn a_lane_that_goes_lets_the_others_in() {
        let locals = Locals::default();
        let mut cx = Context::from_waker(Waker::noop());
        let Poll::Ready(first) = pin!(locals.enter(AT)).poll(&mut cx) else { panic!("it is free") };
        let mut second = Box::pin(locals.enter(AT));
        let mut third = Box::pin(locals.enter(AT));
        let mut fourth = pin!(locals.enter(AT));
        assert!(second.as_mut().poll(&mut cx).is_pending() && third.as_mut().poll(&mut cx).is_pending());
        assert!(fourth.as_mut().poll(&mut cx).is_pending());
        drop(third);
        drop(first);
        // The second was given its turn, and goes without having taken it.
        drop(second);
        assert!(fourth.poll(&mut cx).is_ready());
    }
}
