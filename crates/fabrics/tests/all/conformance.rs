//! Conformance tests: the claims that every fabric must satisfy, whichever side runs its chains, and under any
//! executor. A new fabric adds one line to this file.

#[macro_use]
mod suite;

conformance!(local, Local);
conformance!(shm, Shm);
conformance!(udp, Engine<Udp>);
conformance!(sealed_udp, Engine<SealedUdp>);
conformance!(tcp, Engine<Tcp>);
conformance!(tls, Engine<Tls>);
conformance!(ring, Engine<Rings>);
conformance!(far_local, Far<Local>);
conformance!(far_udp, Far<Engine<Udp>>);
