//! Waits for the answers of enough members of a group, without allocation.
//!
//! Invariant: when [`quorum`] returns, it has dropped all futures that it was given. A request of a dropped future may
//! still run, at most once, until its session ends. A future that makes something visible to others, such as a lock,
//! therefore belongs in a job of [`crate::owned`].

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Outcome of each future of a group; `None` for a future that had not completed, and for a missing one.
pub type Outcomes<T, E, const N: usize> = [Option<Result<T, E>>; N];

/// Runs the futures concurrently until `needed` of them have succeeded, or until so many have failed that this is
/// impossible. Then drops the others. Each place is a pinned `Some(future)`, or `None` if the group has fewer than `N`
/// members.
///
/// The first poll starts every future, even if the first ones complete at once. Else a group over memory that answers
/// without waiting would never ask its last members. A wake polls every future that has not completed. So a group has
/// few members.
///
/// # Errors
/// Fewer than `needed` futures can succeed. The outcomes tell which ones failed, and which succeeded nevertheless.
///
/// ```
/// # use farside_systems::quorum::quorum;
/// # use std::pin::pin;
/// # async fn majority() {
/// let ask = async |member: u32| if member == 1 { Err("lost") } else { Ok(member) };
/// let asked = [pin!(Some(ask(0))), pin!(Some(ask(1))), pin!(Some(ask(2)))];
/// assert_eq!(quorum(2, asked).await, Ok([Some(Ok(0)), Some(Err("lost")), Some(Ok(2))]));
/// # }
/// ```
pub async fn quorum<F, T, E, const N: usize>(
    needed: usize,
    mut futures: [Pin<&mut Option<F>>; N],
) -> Result<Outcomes<T, E, N>, Outcomes<T, E, N>>
where
    F: Future<Output = Result<T, E>>,
{
    let mut outcomes: Outcomes<T, E, N> = [const { None }; N];
    let (mut succeeded, mut running) = (0, futures.iter().filter(|future| future.is_some()).count());
    let is_reached = poll_fn(|cx| {
        for (future, outcome) in futures.iter_mut().zip(&mut outcomes) {
            let Some(polled) = future.as_mut().as_pin_mut() else { continue };
            if let Poll::Ready(ended) = polled.poll(cx) {
                running -= 1;
                succeeded += usize::from(ended.is_ok());
                *outcome = Some(ended);
                future.set(None);
            }
        }
        match (succeeded >= needed, succeeded + running < needed) {
            (true, _) => Poll::Ready(true),
            (_, true) => Poll::Ready(false),
            _ => Poll::Pending,
        }
    })
    .await;
    for future in &mut futures {
        future.set(None);
    }
    if is_reached { Ok(outcomes) } else { Err(outcomes) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::pin::pin;
    use std::task::{Context, Waker};

    /// Future that is ready at its n-th poll, and counts its drop.
    struct At<'a> {
        polls: u32,
        ends: Result<u32, &'static str>,
        dropped: &'a Cell<u32>,
    }

    impl Future for At<'_> {
        type Output = Result<u32, &'static str>;
        fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
            self.polls = self.polls.saturating_sub(1);
            if self.polls == 0 { Poll::Ready(self.ends) } else { Poll::Pending }
        }
    }

    impl Drop for At<'_> {
        fn drop(&mut self) {
            self.dropped.set(self.dropped.get() + 1);
        }
    }

    type Seen = Result<Outcomes<u32, &'static str, 3>, Outcomes<u32, &'static str, 3>>;

    /// Runs a quorum of these futures. Returns the outcome and the number of polls. Asserts that all were dropped.
    fn of(needed: usize, members: [Option<(u32, Result<u32, &'static str>)>; 3]) -> (Seen, u32) {
        let dropped = Cell::new(0);
        let [a, b, c] =
            members.map(|member| member.map(|(polls, ends)| At { polls, ends, dropped: &dropped }));
        let (mut a, mut b, mut c) = (pin!(a), pin!(b), pin!(c));
        let mut asked = pin!(quorum(needed, [a.as_mut(), b.as_mut(), c.as_mut()]));
        let mut polls = 0;
        loop {
            polls += 1;
            if let Poll::Ready(seen) = asked.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                assert_eq!(dropped.get() as usize, members.iter().flatten().count(), "all are dropped");
                return (seen, polls);
            }
        }
    }

    #[test]
    fn a_quorum_returns_with_the_last_answer_that_it_needs() {
        let (seen, polls) = of(2, [Some((5, Ok(0))), Some((1, Ok(1))), Some((3, Ok(2)))]);
        assert_eq!((seen, polls), (Ok([None, Some(Ok(1)), Some(Ok(2))]), 3));
    }

    #[test]
    fn every_future_is_started_even_if_the_first_ones_suffice() {
        let (seen, polls) = of(2, [Some((1, Ok(0))), Some((1, Ok(1))), Some((1, Ok(2)))]);
        assert_eq!((seen, polls), (Ok([Some(Ok(0)), Some(Ok(1)), Some(Ok(2))]), 1));
        let (seen, polls) = of(1, [Some((1, Ok(0))), Some((1, Err("a"))), Some((2, Ok(2)))]);
        assert_eq!((seen, polls), (Ok([Some(Ok(0)), Some(Err("a")), None]), 1));
    }

    #[test]
    fn a_quorum_fails_as_soon_as_it_is_impossible() {
        let (seen, polls) = of(2, [Some((9, Ok(0))), Some((1, Err("a"))), Some((2, Err("b")))]);
        assert_eq!((seen, polls), (Err([None, Some(Err("a")), Some(Err("b"))]), 2));
        assert_eq!(of(2, [Some((1, Ok(0))), None, None]), (Err([Some(Ok(0)), None, None]), 1));
        assert_eq!(of(0, [None, None, None]), (Ok([None, None, None]), 1));
    }
}
