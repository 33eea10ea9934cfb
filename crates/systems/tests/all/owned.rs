//! Tests of jobs that belong to a client: their callers may go at any time, under any executor.

use farside_fabrics::executor::{Core, yield_now};
use farside_systems::owned::{Closed, Jobs};
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

fn poll<T>(future: std::pin::Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// A lock that one job at a time may hold.
#[derive(Default)]
struct Lock {
    is_held: Cell<bool>,
    taken: Cell<u32>,
    undone: Cell<u32>,
}

/// Takes the lock, waits for a few polls, and frees the lock. Undoes the rest of its work if its caller is gone.
async fn under_lock(lock: &Lock, jobs: &Jobs<u32, u32>, lane: usize, polls: u32) -> u32 {
    while lock.is_held.replace(true) {
        yield_now().await;
    }
    lock.taken.set(lock.taken.get() + 1);
    for left in (0..polls).rev() {
        yield_now().await;
        if jobs.is_abandoned(lane) {
            lock.undone.set(lock.undone.get() + 1);
            lock.is_held.set(false);
            return left;
        }
    }
    lock.is_held.set(false);
    0
}

#[test]
fn a_job_whose_caller_goes_at_any_poll_frees_its_lock() {
    for polls_of_caller in 0..4 {
        for polls_of_task in 0..6 {
            let (jobs, lock) = (Jobs::new(1), Lock::default());
            let mut task = pin!(jobs.serve(|lane, polls| under_lock(&lock, &jobs, lane, polls)));
            assert!(poll(task.as_mut()).is_pending());
            {
                let mut caller = pin!(jobs.carry_out(3));
                for _ in 0..polls_of_caller {
                    if poll(caller.as_mut()).is_ready() {
                        break;
                    }
                    (0..polls_of_task).for_each(|_| assert!(poll(task.as_mut()).is_pending()));
                }
            }
            jobs.close();
            let ended = (0..10).any(|_| poll(task.as_mut()).is_ready());
            assert!(ended && jobs.is_idle() && !lock.is_held.get(), "{polls_of_caller} {polls_of_task}");
            let began = u32::from(polls_of_caller > 0 && polls_of_task > 0);
            assert_eq!(lock.taken.get(), began, "{polls_of_caller} {polls_of_task}");
            assert!(lock.undone.get() <= began);
        }
    }
}

#[test]
fn more_callers_than_lanes_take_turns_even_if_one_of_them_goes() {
    let (jobs, order) = (Jobs::new(2), RefCell::new(Vec::new()));
    let mut core = Core::new(());
    core.spawn(jobs.serve(async |_, job: u32| {
        yield_now().await;
        order.borrow_mut().push(job);
        job * 2
    }));
    let left = Cell::new(20);
    for caller in 0..20 {
        let (jobs, left) = (&jobs, &left);
        core.spawn(async move {
            if caller % 5 == 3 {
                // This caller leaves the queue, or its job, after one poll.
                let mut asked = Box::pin(jobs.carry_out(caller));
                std::future::poll_fn(|cx| Poll::Ready(_ = asked.as_mut().poll(cx))).await;
            } else {
                assert_eq!(jobs.carry_out(caller).await, Ok(caller * 2));
            }
            left.set(left.get() - 1);
            if left.get() == 0 {
                jobs.close();
            }
        });
    }
    core.run();
    drop(core);
    let mut done = order.into_inner();
    done.sort_unstable();
    done.retain(|caller| caller % 5 != 3);
    assert_eq!(done.len(), 16, "each caller that stayed had its job done");
}

#[test]
fn a_kept_lane_has_no_other_jobs_and_its_last_job_is_carried_out() {
    // The caller leaves the lane between two jobs, or drops the second one after this many polls of the client's task.
    for (drops_after, awaits_last) in [(None, false), (None, true), (Some(0), false), (Some(1), false)] {
        let (jobs, order) = (Jobs::new(1), RefCell::new(Vec::new()));
        let mut task = pin!(jobs.serve(async |_, job: u32| {
            yield_now().await;
            order.borrow_mut().push(job);
            job
        }));
        assert!(poll(task.as_mut()).is_pending());
        let mut keeping = pin!(jobs.keep());
        assert_eq!(poll(keeping.as_mut()), Poll::Ready(Ok(0)));
        let mut other = pin!(jobs.carry_out(9));
        assert!(poll(other.as_mut()).is_pending());
        {
            let mut first = pin!(jobs.carry_out_in(0, 1));
            let mut polls = (0..5).map(|_| (poll(first.as_mut()), poll(task.as_mut()).is_pending()));
            assert!(polls.any(|(done, _)| done == Poll::Ready(Ok(1))));
        }
        assert!(poll(other.as_mut()).is_pending() && jobs.is_idle(), "the lane is kept");
        assert_eq!(poll(pin!(jobs.carry_out_on(0, 8))), Poll::Ready(None));
        if let Some(polls) = drops_after {
            let mut second = pin!(jobs.carry_out_in(0, 2));
            assert!(poll(second.as_mut()).is_pending());
            (0..polls).for_each(|_| assert!(poll(task.as_mut()).is_pending()));
        }
        match awaits_last {
            true => {
                // Its future is dropped before the client's task has seen the job.
                assert!(poll(pin!(jobs.carry_out_last(0, 3))).is_pending());
            }
            false => jobs.leave(0, 3),
        }
        let polls = (0..9).map(|_| (poll(other.as_mut()), poll(task.as_mut()).is_pending()));
        assert!(polls.into_iter().any(|(done, _)| done == Poll::Ready(Ok(9))), "the lane is free");
        let wanted = if drops_after == Some(1) { vec![1, 2, 3, 9] } else { vec![1, 3, 9] };
        assert_eq!(*order.borrow(), wanted, "{drops_after:?} {awaits_last}");
        assert!(jobs.is_idle());
    }
}

#[test]
fn the_last_job_of_a_kept_lane_is_carried_out_after_the_jobs_are_closed() {
    let (jobs, order) = (Jobs::new(2), RefCell::new(Vec::new()));
    let mut task = pin!(jobs.serve(async |_, job: u32| order.borrow_mut().push(job)));
    assert!(poll(task.as_mut()).is_pending());
    let mut keeping = pin!(jobs.keep());
    assert_eq!(poll(keeping.as_mut()), Poll::Ready(Ok(0)));
    jobs.leave(0, 1);
    jobs.close();
    assert_eq!(poll(pin!(jobs.keep())), Poll::Ready(Err(Closed)));
    assert_eq!(poll(pin!(jobs.carry_out_in(0, 2))), Poll::Ready(Err(Closed)));
    assert!(poll(task.as_mut()).is_ready());
    assert_eq!(*order.borrow(), [1]);
}

#[test]
fn jobs_run_under_a_foreign_executor_and_end_with_the_task() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let set = tokio::task::LocalSet::new();
    set.block_on(&runtime, async {
        let jobs = Rc::new(Jobs::new(1));
        let theirs = Rc::clone(&jobs);
        let task = tokio::task::spawn_local(async move {
            theirs
                .serve(async |_, job: u32| {
                    for _ in 0..job {
                        tokio::task::yield_now().await;
                    }
                    job + 1
                })
                .await;
        });
        assert_eq!(jobs.carry_out(2).await, Ok(3));
        let asked = Rc::clone(&jobs);
        let caller = tokio::task::spawn_local(async move { asked.carry_out(u32::MAX).await });
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        task.abort();
        assert_eq!(caller.await.expect("it ends"), Err(Closed));
        assert_eq!(jobs.carry_out(1).await, Err(Closed));
    });
}

#[test]
fn a_job_for_one_lane_is_begun_only_if_that_lane_is_free() {
    let jobs = Jobs::new(2);
    let mut task = pin!(jobs.serve(async |lane, job: usize| {
        yield_now().await;
        lane * 10 + job
    }));
    let mut of_the_second = pin!(jobs.carry_out_on(1, 3));
    assert!(poll(of_the_second.as_mut()).is_pending());
    assert_eq!(poll(pin!(jobs.carry_out_on(1, 4))), Poll::Ready(None), "the lane is busy");
    let mut of_any = pin!(jobs.carry_out(5));
    assert!(poll(of_any.as_mut()).is_pending());
    (0..3).for_each(|_| assert!(poll(task.as_mut()).is_pending()));
    assert_eq!(poll(of_the_second.as_mut()), Poll::Ready(Some(Ok(13))));
    assert_eq!(poll(of_any.as_mut()), Poll::Ready(Ok(5)));
    jobs.close();
    assert!(poll(task.as_mut()).is_ready());
    assert_eq!(poll(pin!(jobs.carry_out_on(0, 6))), Poll::Ready(None), "the jobs are closed");
}
