//! Waiting for file descriptors under any executor: one thread of the process waits for all of them.
//!
//! The client core ([`crate::executor`]) waits for its descriptors itself. This module serves endpoints that run under
//! another executor. The waiting thread starts when the first descriptor is watched.

use rustix::event::epoll;
use std::collections::BTreeMap;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

static REACTOR: LazyLock<std::io::Result<&'static Reactor>> = LazyLock::new(|| {
    let poll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let reactor: &'static Reactor = Box::leak(Box::new(Reactor { poll, watched: Mutex::default() }));
    std::thread::Builder::new().name("farside-reactor".into()).spawn(move || reactor.run())?;
    Ok(reactor)
});

struct Reactor {
    poll: OwnedFd,
    watched: Mutex<Watched>,
}

#[derive(Default)]
struct Watched {
    next: u64,
    wakers: BTreeMap<u64, Waker>,
}

/// A registration of a descriptor with the waiting thread. The descriptor must stay open as long as the registration
/// exists.
pub(crate) struct Watch<'a> {
    reactor: &'static Reactor,
    fd: BorrowedFd<'a>,
    id: u64,
}

impl<'a> Watch<'a> {
    /// Registers `fd`. No task is woken before [`Watch::arm`] is called.
    ///
    /// # Errors
    /// The system cannot watch another descriptor.
    pub(crate) fn new(fd: BorrowedFd<'a>) -> std::io::Result<Watch<'a>> {
        let reactor = match &*REACTOR {
            Ok(reactor) => *reactor,
            Err(error) => return Err(std::io::Error::new(error.kind(), error.to_string())),
        };
        let id = {
            let mut watched = reactor.watched();
            watched.next += 1;
            watched.next
        };
        epoll::add(&reactor.poll, fd, epoll::EventData::new_u64(id), epoll::EventFlags::empty())?;
        Ok(Watch { reactor, fd, id })
    }

    /// Wakes `waker` once when `fd` becomes readable.
    pub(crate) fn arm(&self, waker: &Waker) {
        let before = self.reactor.watched().wakers.insert(self.id, waker.clone());
        drop(before); // Runs foreign code, so not under the lock.
        let events = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        let data = epoll::EventData::new_u64(self.id);
        if epoll::modify(&self.reactor.poll, self.fd, data, events).is_err() {
            waker.wake_by_ref(); // The task polls the descriptor itself.
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        let _not_watched_anyway = epoll::delete(&self.reactor.poll, self.fd);
        let forgotten = self.reactor.watched().wakers.remove(&self.id);
        drop(forgotten);
    }
}

impl Reactor {
    fn watched(&self) -> MutexGuard<'_, Watched> {
        self.watched.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let mut events = Vec::with_capacity(64);
            if epoll::wait(&self.poll, rustix::buffer::spare_capacity(&mut events), None).is_err() {
                continue; // Interrupted.
            }
            let ids = events.iter().map(|event| event.data.u64());
            let wakers: Vec<Waker> = {
                let mut watched = self.watched();
                ids.filter_map(|id| watched.wakers.remove(&id)).collect()
            };
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::executor::block_on;
    use std::os::fd::AsFd;
    use std::task::Poll;

    #[test]
    fn a_task_is_woken_when_its_descriptor_becomes_readable() {
        let (reader, writer) = rustix::pipe::pipe().expect("a pipe");
        let watch = Watch::new(reader.as_fd()).expect("it can be watched");
        let writes = std::thread::spawn(move || {
            std::thread::sleep(std::time::Duration::from_millis(10));
            rustix::io::write(&writer, b"!").expect("the pipe is empty");
            writer
        });
        let mut polls = 0;
        block_on(
            (),
            std::future::poll_fn(|cx| {
                polls += 1;
                if polls == 2 {
                    return Poll::Ready(());
                }
                watch.arm(cx.waker());
                Poll::Pending
            }),
        );
        writes.join().expect("the writer does not panic");
    }
}
