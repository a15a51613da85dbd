// SPDX-License-Identifier: Apache-2.0
//
// Carries the precompiled headers that every test reuses; it is no test itself.
int main() { return 0; }
