// SPDX-License-Identifier: Apache-2.0
//
// Everything in one include.
#ifndef ESPALIER_ESPALIER_H_
#define ESPALIER_ESPALIER_H_

#include <espalier/backend.h>
#include <espalier/checkpoint.h>
#include <espalier/dense_slices.h>
#include <espalier/device.h>
#include <espalier/experts.h>
#include <espalier/extent_plan.h>
#include <espalier/formats.h>
#include <espalier/host_buffer.h>
#include <espalier/moe.h>
#include <espalier/prepare.h>
#include <espalier/status.h>
#include <espalier/version.h>

#endif  // ESPALIER_ESPALIER_H_
